#include "dispatch/local_dispatcher.h"

#include "core/checked.h"
#include "core/workspace_layout.h"
#include "dispatch/call_checks.h"
#include "dispatch/permute.h"
#include "dispatch/unpermute_reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

namespace conclave::inline v0::dispatch {
namespace {

int64_t slot_bound(const DispatchProblem& problem, int64_t num_local_experts) {
  const auto slots = checked_mul(problem.max_tokens, std::min(problem.top_k, num_local_experts));
  const auto assignments = checked_mul(problem.max_tokens, problem.top_k);
  if (!slots || !assignments) {
    throw Error(ErrorCode::kSizeOverflow,
                {.what = "max_tokens x top_k does not fit 63 bits", .tensor = "max_tokens"});
  }
  return *slots;
}

class LocalDispatcher final : public Dispatcher {
 public:
  explicit LocalDispatcher(const DispatchProblem& problem)
      : problem_(problem), epoch_(epoch_of(problem)) {
    const auto rank = static_cast<size_t>(problem.ep_rank);
    num_local_experts_ = static_cast<int64_t>(epoch_->places.experts[rank].size());
    const auto owned = static_cast<int64_t>(epoch_->experts.experts_of[rank].size());
    holds_all_ = owned == problem.num_experts;
    max_slots_ = slot_bound(problem, num_local_experts_);
    expert_begin_ = layout_.book<int64_t>(num_local_experts_);
    expert_count_ = layout_.book<int64_t>(num_local_experts_);
    last_row_ = layout_.book<int64_t>(num_local_experts_);
    source_row_ = layout_.book<int64_t>(max_slots_);
    slot_of_ = layout_.book<int64_t>(problem.max_tokens * problem.top_k);
    batch_ = layout_.book<ExpertBatch>(1);
    local_ids_ = layout_.book<int32_t>(problem.max_tokens * problem.top_k);
  }

  int64_t num_local_experts() const override { return num_local_experts_; }
  int64_t max_slots() const override { return max_slots_; }
  size_t workspace_bytes() const override { return layout_.total_bytes(); }

  void begin_dispatch(const DispatchArgs& args, std::span<std::byte> workspace,
                      Executor&) const override {
    const Routing& routing = args.routing;
    check_workspace(workspace, workspace_bytes());
    check_dispatch(problem_, routing, args.rows);
    const PlacementEpoch& epoch = epoch_of(args, *epoch_);
    const std::array blocks = {AssignmentBlock{.local_expert = local_ids(routing, epoch, workspace),
                                               .num_rows = routing.num_tokens,
                                               .first_row = 0,
                                               .slot_of = slice_as<int64_t>(workspace, slot_of_)}};
    const PermuteTarget target{.num_local_experts = num_local_experts_,
                               .expert_begin = slice_as<int64_t>(workspace, expert_begin_),
                               .expert_count = slice_as<int64_t>(workspace, expert_count_),
                               .source_row = slice_as<int64_t>(workspace, source_row_),
                               .last_row = slice_as<int64_t>(workspace, last_row_)};
    const PermuteResult result = permute(blocks, routing.top_k, target);
    *slice_as<ExpertBatch>(workspace, batch_) = {.bundle = args.rows,
                                                 .layout = BatchLayout::kContiguous,
                                                 .num_local_experts = num_local_experts_,
                                                 .num_slots = result.occupied_slots,
                                                 .expert_begin = target.expert_begin,
                                                 .expert_count = target.expert_count,
                                                 .source_row = target.source_row};
  }

  bool rows_have_come(std::span<std::byte>) const override { return true; }

  ExpertBatch await_dispatch(std::span<std::byte> workspace) const override {
    return *slice_as<ExpertBatch>(workspace, batch_);
  }

  void begin_combine(const CombineArgs& args, std::span<std::byte> workspace,
                     Executor&) const override {
    check_workspace(workspace, workspace_bytes());
    check_combine(problem_, args);
  }

  void await_combine(const CombineArgs& args, std::span<std::byte> workspace,
                     Executor& executor) const override {
    UnpermuteArgs unpermute{.rows = args.output.rows,
                            .row_stride = args.output.row_stride,
                            .num_tokens = args.routing.num_tokens / problem_.rows_per_sum,
                            .finish = args.finish,
                            .out = args.out};
    if (args.output.tag == OutputTag::kPerRow) {
      unpermute.row_of = slice_as<int64_t>(workspace, slot_of_);
      unpermute.weights = args.routing.topk_weights;
      unpermute.terms = args.routing.top_k * problem_.rows_per_sum;
    }
    unpermute_reduce(unpermute, executor);
  }

 private:
  // If this rank holds every expert in order, as it does at first, ids are local indexes already.
  const int32_t* local_ids(const Routing& routing, const PlacementEpoch& epoch,
                           std::span<std::byte> workspace) const {
    if (holds_all_ && &epoch == epoch_.get()) return routing.topk_ids;
    auto* ids = slice_as<int32_t>(workspace, local_ids_);
    for (int64_t i = 0; i < routing.num_tokens * routing.top_k; ++i) {
      const int32_t expert = routing.topk_ids[i];
      const bool known = expert >= 0 && expert < problem_.num_experts;
      const auto at = static_cast<size_t>(expert);
      const bool here = known && epoch.experts.rank_of[at] == problem_.ep_rank;
      ids[i] = here ? epoch.experts.local_of[at] : -1;
    }
    return ids;
  }

  DispatchProblem problem_;
  std::shared_ptr<const PlacementEpoch> epoch_;  // as planned
  int64_t num_local_experts_ = 0;
  bool holds_all_ = false;
  int64_t max_slots_ = 0;
  WorkspaceLayout layout_;
  WorkspaceSlice expert_begin_;
  WorkspaceSlice expert_count_;
  WorkspaceSlice last_row_;
  WorkspaceSlice source_row_;
  WorkspaceSlice slot_of_;
  WorkspaceSlice batch_;  // from begin_dispatch to await_dispatch
  WorkspaceSlice local_ids_;
};

}  // namespace

Support local_supports(const DispatchProblem& problem) {
  if (Support sizes = plannable(problem); !sizes) return sizes;
  if (problem.ep_size != 1 && problem.reduce == Reduce::kFull) {
    return Support::no(fmt::format("experts are on {} ranks, not one", problem.ep_size));
  }
  return Support::yes();
}

std::unique_ptr<Dispatcher> make_local_dispatcher(const DispatchProblem& problem) {
  require(local_supports(problem));
  return std::make_unique<LocalDispatcher>(problem);
}

}  // namespace conclave::inline v0::dispatch
