#include "dispatch/ep_dispatcher.h"

#include "core/workspace_layout.h"
#include "cpu/parallel.h"
#include "dispatch/call_checks.h"
#include "dispatch/ep_exchange.h"
#include "dispatch/ep_plan.h"
#include "dispatch/ep_receive.h"
#include "dispatch/ep_send.h"
#include "dispatch/ep_tables.h"
#include "dispatch/ep_transport.h"
#include "dispatch/permute.h"
#include "dispatch/unpermute_reduce.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

// Rows copied per task.
constexpr int64_t kRowGrain = 16;

class EpDispatcher final : public Dispatcher {
 public:
  explicit EpDispatcher(const DispatchProblem& problem)
      : plan_(make_ep_plan(problem)),
        tables_(plan_, layout_),
        blocks_(layout_.book<AssignmentBlock>(problem.ep_size)),
        return_exchange_(problem.ep_size, plan_.moves_results(), layout_),
        return_handle_(layout_.book<CommHandle>(1)),
        transport_(plan_.fixed_slots ? make_fixed_slot_transport(plan_, layout_)
                                     : make_variable_transport(plan_, layout_)) {}

  int64_t num_local_experts() const override { return plan_.num_local_experts; }
  int64_t max_slots() const override { return plan_.max_slots; }
  size_t workspace_bytes() const override { return layout_.total_bytes(); }

  void begin_dispatch(const DispatchArgs& args, std::span<std::byte> workspace,
                      Executor& executor) const override {
    check_workspace(workspace, workspace_bytes());
    check_dispatch(plan_.problem, args.routing, args.rows);
    const PlacementEpoch& epoch = epoch_of(args, *plan_.problem.epoch);
    const EpTables tables = tables_.at(workspace);
    *tables.num_tokens = args.routing.num_tokens;
    *tables.epoch = epoch.number;
    count_sends(plan_, args.routing, epoch.experts, tables);
    transport_->open(tables, workspace);
    describe_sends(plan_, args.routing, epoch.experts, tables);
    pack_rows(args.rows, tables, executor);
    transport_->begin(tables, workspace);
  }

  bool rows_have_come(std::span<std::byte> workspace) const override {
    return transport_->has_come(workspace);
  }

  ExpertBatch await_dispatch(std::span<std::byte> workspace) const override {
    const EpTables tables = tables_.at(workspace);
    const BundleRows bundle = transport_->await(tables, workspace);
    try {
      check_received(plan_, tables);
    } catch (const CommError& error) {
      // Only this rank has seen the error: without an abort the others would wait for its results.
      plan_.problem.communicator->abort(error.what());
      throw;
    }
    return group_by_expert(bundle, tables, workspace);
  }

  void begin_combine(const CombineArgs& args, std::span<std::byte> workspace,
                     Executor& executor) const override {
    check_workspace(workspace, workspace_bytes());
    check_combine(plan_.problem, args);
    const EpTables tables = tables_.at(workspace);
    check_pair(args, tables);
    if (plan_.reduced) {
      reduce_here(args.output, tables, executor);
    } else {
      gather_results(args.output, tables, executor);
    }
    *slice_as<CommHandle>(workspace, return_handle_) = return_exchange_.begin(
        *plan_.problem.communicator,
        {tables.owed_rows, tables.owed_base, tables.home_rows, tables.home_base},
        plan_.problem.hidden_size * static_cast<int64_t>(sizeof(float)), tables.owed, tables.home,
        workspace);
  }

  void await_combine(const CombineArgs& args, std::span<std::byte> workspace,
                     Executor& executor) const override {
    const EpTables tables = tables_.at(workspace);
    Communicator& communicator = *plan_.problem.communicator;
    communicator.wait(*slice_as<CommHandle>(workspace, return_handle_), communicator.timeout(),
                      "combine.rows");
    unpermute_reduce({.rows = tables.home,
                      .row_stride = plan_.problem.hidden_size,
                      .row_of = tables.home_row,
                      .weights = plan_.reduced ? nullptr : args.routing.topk_weights,
                      .num_tokens = args.routing.num_tokens / plan_.problem.rows_per_sum,
                      .terms = plan_.terms * plan_.problem.rows_per_sum,
                      .finish = args.finish,
                      .out = args.out},
                     executor);
  }

 private:
  // Copies each row once per rank that owns one of its experts.
  void pack_rows(const RowBundle& rows, const EpTables& tables, Executor& executor) const {
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      std::byte* const destination = tables.send_blocks[rank].rows;
      const int64_t* const tokens = tables.send_token + tables.send_base[rank];
      cpu::parallel_for(executor, tables.send_rows[rank], kRowGrain,
                        [&](int64_t begin, int64_t end, int32_t) {
                          for (int64_t row = begin; row < end; ++row) {
                            std::memcpy(destination + row * rows.row_bytes,
                                        rows.rows + tokens[row] * rows.row_bytes,
                                        static_cast<size_t>(rows.row_bytes));
                          }
                        });
    }
  }

  ExpertBatch group_by_expert(const BundleRows& bundle, const EpTables& tables,
                              std::span<std::byte> workspace) const {
    const auto ranks = static_cast<size_t>(plan_.ranks());
    const std::span blocks(slice_as<AssignmentBlock>(workspace, blocks_), ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const ReceivedBlock& received = tables.received[rank];
      blocks[rank] = {.local_expert = received.ids,
                      .num_rows = received.num_rows,
                      .first_row = received.first_row,
                      .slot_of = tables.slot_of + tables.recv_base[rank] * plan_.problem.top_k};
    }
    const BatchLayout layout = plan_.fixed_slots ? BatchLayout::kPadded : BatchLayout::kContiguous;
    const PermuteResult result = permute(blocks, plan_.problem.top_k,
                                         {.layout = layout,
                                          .num_local_experts = plan_.num_local_experts,
                                          .slots_per_expert = plan_.slots_per_expert,
                                          .expert_begin = tables.expert_begin,
                                          .expert_count = tables.expert_count,
                                          .source_row = tables.source_row,
                                          .last_row = tables.expert_row});
    return {.bundle = {.rows = bundle.rows,
                       .num_rows = bundle.num_rows,
                       .row_bytes = plan_.problem.row_bytes,
                       .dtype = plan_.problem.row_dtype},
            .layout = layout,
            .num_local_experts = plan_.num_local_experts,
            .num_slots = plan_.fixed_slots ? plan_.max_slots : result.occupied_slots,
            .expert_begin = tables.expert_begin,
            .expert_count = tables.expert_count,
            .source_row = tables.source_row};
  }

  void check_pair(const CombineArgs& args, const EpTables& tables) const {
    if (args.output.tag != OutputTag::kPerRow) {
      throw Error(ErrorCode::kUnsupported,
                  {.what = "expert-parallel combine needs one output row per batch slot"});
    }
    if (args.routing.num_tokens == *tables.num_tokens) return;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "combine is not for the routing of the last dispatch in this workspace",
                 .tensor = "num_tokens",
                 .expected = std::to_string(*tables.num_tokens),
                 .found = std::to_string(args.routing.num_tokens)});
  }

  // Copies results in the order of (home rank, row, slot), as the home rank expects them.
  void gather_results(const ExpertOutput& output, const EpTables& tables,
                      Executor& executor) const {
    const int64_t top_k = plan_.problem.top_k;
    const int64_t hidden = plan_.problem.hidden_size;
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const int64_t base = tables.recv_base[rank];
      float* const owed = tables.owed + tables.owed_base[rank] * hidden;
      cpu::parallel_for(
          executor, tables.recv_rows[rank], kRowGrain, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t row = base + begin; row < base + end; ++row) {
              int64_t result = tables.first_owed[row];
              for (int64_t slot = 0; slot < top_k; ++slot) {
                const int64_t batch_slot = tables.slot_of[row * top_k + slot];
                if (batch_slot < 0) continue;
                std::memcpy(owed + result++ * hidden, output.rows + batch_slot * output.row_stride,
                            static_cast<size_t>(hidden) * sizeof(float));
              }
            }
          });
    }
  }

  // Makes one weighted sum per received row.
  void reduce_here(const ExpertOutput& output, const EpTables& tables, Executor& executor) const {
    const int64_t hidden = plan_.problem.hidden_size;
    for (int32_t rank = 0; rank < plan_.ranks(); ++rank) {
      const int64_t rows = tables.recv_rows[rank];
      unpermute_reduce({.rows = output.rows,
                        .row_stride = output.row_stride,
                        .row_of = tables.slot_of + tables.recv_base[rank] * plan_.problem.top_k,
                        .weights = tables.received[rank].weights,
                        .num_tokens = rows,
                        .terms = plan_.problem.top_k,
                        .out = {tables.owed + tables.owed_base[rank] * hidden, DType::kF32,
                                Shape{rows, hidden}, 0}},
                       executor);
    }
  }

  EpPlan plan_;
  WorkspaceLayout layout_;
  EpTableLayout tables_;
  WorkspaceSlice blocks_;
  Exchange return_exchange_;
  WorkspaceSlice return_handle_;
  std::unique_ptr<RowTransport> transport_;
};

Support ep_supports(const DispatchProblem& problem) {
  if (Support sizes = plannable(problem); !sizes) return sizes;
  if (problem.reduce == Reduce::kPartial) return Support::no("partial sums need no exchange");
  if (problem.combine == EpCombine::kRoundedPerRank) {
    return Support::no("sums that are rounded to 16 bits travel between GPUs only");
  }
  const Communicator* const communicator = problem.communicator;
  if (communicator == nullptr) return Support::no("the context has no communicator");
  if (communicator->size() != problem.ep_size || communicator->rank() != problem.ep_rank) {
    return Support::no(
        fmt::format("the communicator is rank {} of {}, the layer is planned as rank {} of {}",
                    communicator->rank(), communicator->size(), problem.ep_rank, problem.ep_size));
  }
  return Support::yes();
}

}  // namespace

Support ep_variable_supports(const DispatchProblem& problem) {
  if (problem.transport != EpTransport::kVariable) {
    return Support::no("the fixed-slot transport was asked for");
  }
  return ep_supports(problem);
}

Support ep_fixed_slots_supports(const DispatchProblem& problem) {
  if (problem.transport != EpTransport::kFixedSlots) {
    return Support::no("the variable-size transport was asked for");
  }
  return ep_supports(problem);
}

std::unique_ptr<Dispatcher> make_ep_dispatcher(const DispatchProblem& problem) {
  require(ep_supports(problem));
  return std::make_unique<EpDispatcher>(problem);
}

}  // namespace conclave::inline v0::dispatch
