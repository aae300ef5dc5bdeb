// After warm-up, dispatch and combine allocate nothing, on one rank or several.
#include "dispatch/ep_problem.h"
#include "support/allocation_counter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace conclave {
namespace {

using testing::EpCase;

// One rank's buffers, allocated once.
struct RankCall {
  RankCall(const EpCase& c, int32_t rank, Communicator& communicator)
      : problem(c),
        dispatcher(c.ranks == 1 && c.transport == EpTransport::kVariable
                       ? dispatch::dispatcher_catalog()
                             .find("local", "dispatcher")
                             .make(testing::problem_of(c, rank, &communicator))
                       : testing::make_dispatcher(c, rank, communicator)),
        workspace(dispatcher->workspace_bytes()),
        input(testing::random_input(c.max_tokens, c.top_k, c.experts, c.hidden, 1)),
        rows(testing::bundle_rows(input, c.hidden)),
        outputs(static_cast<size_t>(dispatcher->max_slots() * c.hidden)),
        out(input.hidden.size()) {}

  void run(int64_t tokens) {
    const Routing routing{tokens, problem.top_k, input.ids.data(), input.weights.data()};
    dispatcher->dispatch(routing,
                         {reinterpret_cast<const std::byte*>(rows.data()), tokens,
                          testing::float_row_bytes(problem.hidden), DType::kF32},
                         workspace.span(), executor);
    dispatcher->combine({.output = {OutputTag::kPerRow, outputs.data(), problem.hidden},
                         .routing = routing,
                         .out = {out.data(), DType::kF32, Shape{tokens, problem.hidden}, 0}},
                        workspace.span(), executor);
  }

  EpCase problem;
  std::unique_ptr<dispatch::Dispatcher> dispatcher;
  testing::PoisonedWorkspace workspace;
  testing::SerialExecutor executor;
  testing::TokenInput input;
  std::vector<float> rows;
  std::vector<float> outputs;
  std::vector<float> out;
};

testing::AllocationCounts count_in_steady_state(const EpCase& c) {
  testing::AllocationCounts counts;
  const auto outcomes = testing::run_ranks(make_local_group({.num_ranks = c.ranks}),
                                           [&](int32_t rank, Communicator& communicator) {
                                             RankCall call(c, rank, communicator);
                                             for (int warm_up = 0; warm_up < 3; ++warm_up)
                                               call.run(c.max_tokens);
                                             communicator.barrier("warm");
                                             if (rank == 0) testing::arm_allocation_counter();
                                             communicator.barrier("start");
                                             for (int64_t step = 0; step < 200; ++step)
                                               call.run(step % (c.max_tokens + 1));
                                             communicator.barrier("stop");
                                             if (rank == 0)
                                               counts = testing::disarm_allocation_counter();
                                             communicator.barrier("end");
                                           });
  EXPECT_EQ(testing::first_failure(outcomes), "");
  return counts;
}

TEST(DispatchAllocation, Counter_SeesAllocations) {
  testing::arm_allocation_counter();
  const std::vector<int> kept(100);
  EXPECT_GT(testing::disarm_allocation_counter().heap, 0) << kept.size();
}

TEST(DispatchAllocation, SteadyState_AllocatesNothing) {
  for (const int32_t ranks : {1, 3}) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
        const EpCase c{
            .ranks = ranks, .experts = 7, .top_k = 3, .transport = transport, .combine = combine};
        SCOPED_TRACE(testing::describe(c));
        const testing::AllocationCounts counts = count_in_steady_state(c);
        EXPECT_EQ(counts.heap, 0);
        EXPECT_EQ(counts.mappings, 0);
      }
    }
  }
}

}  // namespace
}  // namespace conclave
