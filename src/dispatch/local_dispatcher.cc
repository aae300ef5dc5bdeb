#include "dispatch/local_dispatcher.h"

#include "core/checked.h"
#include "core/workspace_layout.h"
#include "dispatch/call_checks.h"
#include "dispatch/permute.h"
#include "dispatch/unpermute_reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace conclave::inline v0::dispatch {
namespace {

int64_t slot_bound(const DispatchProblem& problem) {
  const auto slots = checked_mul(problem.max_tokens, std::min(problem.top_k, problem.num_experts));
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
      : problem_(problem), max_slots_(slot_bound(problem)) {
    expert_begin_ = layout_.book<int64_t>(problem.num_experts);
    expert_count_ = layout_.book<int64_t>(problem.num_experts);
    last_row_ = layout_.book<int64_t>(problem.num_experts);
    source_row_ = layout_.book<int64_t>(max_slots_);
    slot_of_ = layout_.book<int64_t>(problem.max_tokens * problem.top_k);
  }

  int64_t num_local_experts() const override { return problem_.num_experts; }
  int64_t max_slots() const override { return max_slots_; }
  size_t workspace_bytes() const override { return layout_.total_bytes(); }

  ExpertBatch dispatch(const Routing& routing, const RowBundle& rows,
                       std::span<std::byte> workspace, Executor&) const override {
    check_workspace(workspace, workspace_bytes());
    check_dispatch(problem_, routing, rows);
    const std::array blocks = {AssignmentBlock{.local_expert = routing.topk_ids,
                                               .num_rows = routing.num_tokens,
                                               .first_row = 0,
                                               .slot_of = slice_as<int64_t>(workspace, slot_of_)}};
    const PermuteTarget target{.num_local_experts = problem_.num_experts,
                               .expert_begin = slice_as<int64_t>(workspace, expert_begin_),
                               .expert_count = slice_as<int64_t>(workspace, expert_count_),
                               .source_row = slice_as<int64_t>(workspace, source_row_),
                               .last_row = slice_as<int64_t>(workspace, last_row_)};
    const PermuteResult result = permute(blocks, routing.top_k, target);
    return {.bundle = rows,
            .layout = BatchLayout::kContiguous,
            .num_local_experts = problem_.num_experts,
            .num_slots = result.occupied_slots,
            .expert_begin = target.expert_begin,
            .expert_count = target.expert_count,
            .source_row = target.source_row};
  }

  void combine(const CombineArgs& args, std::span<std::byte> workspace,
               Executor& executor) const override {
    check_workspace(workspace, workspace_bytes());
    check_combine(problem_, args);
    UnpermuteArgs unpermute{.rows = args.output.rows,
                            .row_stride = args.output.row_stride,
                            .num_tokens = args.routing.num_tokens,
                            .shared = args.shared,
                            .shared_stride = args.shared_stride,
                            .out = args.out};
    if (args.output.tag == OutputTag::kPerRow) {
      unpermute.row_of = slice_as<int64_t>(workspace, slot_of_);
      unpermute.weights = args.routing.topk_weights;
      unpermute.terms = args.routing.top_k;
    }
    unpermute_reduce(unpermute, executor);
  }

 private:
  DispatchProblem problem_;
  int64_t max_slots_;
  WorkspaceLayout layout_;
  WorkspaceSlice expert_begin_;
  WorkspaceSlice expert_count_;
  WorkspaceSlice last_row_;
  WorkspaceSlice source_row_;
  WorkspaceSlice slot_of_;
};

}  // namespace

Support local_supports(const DispatchProblem& problem) {
  if (Support sizes = plannable(problem); !sizes) return sizes;
  if (problem.ep_size != 1) {
    return Support::no(fmt::format("experts are on {} ranks, not one", problem.ep_size));
  }
  return Support::yes();
}

std::unique_ptr<Dispatcher> make_local_dispatcher(const DispatchProblem& problem) {
  require(local_supports(problem));
  return std::make_unique<LocalDispatcher>(problem);
}

}  // namespace conclave::inline v0::dispatch
