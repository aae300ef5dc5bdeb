// Compares expert parallelism over 1, 2, 4 and 8 thread ranks with the plain layer of one rank.
#include "dispatch/ep_plan.h"
#include "dispatch/ep_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace conclave {
namespace {

using testing::EpCase;
using testing::EpRun;
using testing::TokenInput;

// Calls body(case) for every combination of ranks, experts, placement and transport.
template <class Body>
void for_each_case(EpCombine combine, const Body& body) {
  for (const int32_t ranks : {1, 2, 4, 8}) {
    for (const int64_t experts : {8, 10, 3}) {  // even, uneven, fewer than ranks
      for (const auto placement : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
        for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
          for (const int64_t top_k : {int64_t{1}, int64_t{3}}) {
            body(EpCase{.ranks = ranks,
                        .experts = experts,
                        .top_k = top_k,
                        .placement = placement,
                        .transport = transport,
                        .combine = combine});
          }
        }
      }
    }
  }
}

// Tokens per rank, repeated over the ranks: none, one, many, and the planned maximum.
const std::vector<std::vector<int64_t>> kTokenPatterns = {
    {5, 0, 1, 16}, {0}, {1, 0}, {16}, {0, 0, 0, 7}};

TEST(EpUnreduced, AnyRanksAndPlacement_HaveTheBitsOfOneRank) {
  uint32_t seed = 1;
  for_each_case(EpCombine::kUnreduced, [&](const EpCase& c) {
    SCOPED_TRACE(testing::describe(c));
    for (const auto& tokens : kTokenPatterns) {
      const auto inputs = testing::random_inputs(c, tokens, seed += 10);
      const EpRun run = testing::run_ep(c, {inputs});
      ASSERT_EQ(testing::first_failure(run.outcomes), "");
      EXPECT_EQ(run.outputs, testing::plain_layers(c, inputs));
    }
  });
}

// Each token's terms may be added in another order; both orders lie within this distance of the
// exact sum.
void expect_reassociated(const std::vector<float>& actual, const std::vector<float>& expected,
                         const TokenInput& input, const EpCase& c) {
  const double unit = 0.5 * static_cast<double>(std::numeric_limits<float>::epsilon());
  const double roundings = 2.0 * static_cast<double>(2 * c.top_k + c.ranks);
  TokenInput magnitudes = input;
  for (float& x : magnitudes.hidden) x = std::fabs(x);
  for (float& w : magnitudes.weights) w = std::fabs(w);
  const auto bounds = testing::plain_layer(magnitudes, c.top_k, c.experts, c.hidden);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::fabs(static_cast<double>(actual[i]) - static_cast<double>(expected[i])),
              roundings * unit * static_cast<double>(bounds[i]))
        << "element " << i;
  }
}

TEST(EpReducedPerRank, AnyRanksAndPlacement_AgreeUpToTheOrderOfTheSum) {
  uint32_t seed = 5001;
  for_each_case(EpCombine::kReducedPerRank, [&](const EpCase& c) {
    SCOPED_TRACE(testing::describe(c));
    for (const auto& tokens : kTokenPatterns) {
      const auto inputs = testing::random_inputs(c, tokens, seed += 10);
      const EpRun run = testing::run_ep(c, {inputs});
      ASSERT_EQ(testing::first_failure(run.outcomes), "");
      const auto expected = testing::plain_layers(c, inputs);
      for (size_t rank = 0; rank < inputs.size(); ++rank) {
        expect_reassociated(run.outputs[rank], expected[rank], inputs[rank], c);
      }
    }
  });
}

TEST(EpReducedPerRank, SeveralRanks_ChangeBitsSomewhere) {
  // The negative control for the bit equality above, which must detect a sum by ranks.
  const EpCase c{.ranks = 4, .experts = 16, .top_k = 8, .combine = EpCombine::kReducedPerRank};
  const auto inputs = testing::random_inputs(c, {16}, 77);
  EXPECT_NE(testing::run_ep(c, {inputs}).outputs, testing::plain_layers(c, inputs));
}

TEST(EpPlan, HomeRows_HoldAllThatTheRanksMayOwe) {
  for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
    for_each_case(combine, [](const EpCase& c) {
      SCOPED_TRACE(testing::describe(c));
      int64_t owed = 0;
      for (int32_t rank = 0; rank < c.ranks; ++rank) {
        owed += dispatch::make_ep_plan(testing::problem_of(c, rank, nullptr)).max_owed_rows;
      }
      // Each rank plans equally for every home. A token has at most one result per choice, but the
      // size of a fixed slot does not depend on the choices.
      const int64_t coming = owed / c.ranks;
      const int64_t chosen = c.max_tokens * c.top_k;
      for (int32_t rank = 0; rank < c.ranks; ++rank) {
        const auto plan = dispatch::make_ep_plan(testing::problem_of(c, rank, nullptr));
        EXPECT_EQ(plan.max_home_rows,
                  c.transport == EpTransport::kFixedSlots ? coming : std::min(coming, chosen));
      }
    });
  }
}

TEST(Ep, ManyStepsInOneDirtyWorkspace_EachEqualThePlainLayer) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 3, .experts = 7, .top_k = 4, .transport = transport};
    std::vector<std::vector<TokenInput>> steps;
    for (uint32_t step = 0; step < 40; ++step) {
      steps.push_back(testing::random_inputs(
          c, {static_cast<int64_t>(step * 7 % 17), static_cast<int64_t>(step % 2), 16},
          1000 + step * 10));
      const EpRun run = testing::run_ep(c, steps);
      ASSERT_EQ(testing::first_failure(run.outcomes), "");
      ASSERT_EQ(run.outputs, testing::plain_layers(c, steps.back())) << "step " << step;
    }
  }
}

TEST(Ep, EmptyRanks_StayInStepForManySteps) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 4,
                   .experts = 3,
                   .top_k = 2,
                   .hidden = 16,
                   .max_tokens = 3,
                   .transport = transport};
    std::vector<std::vector<TokenInput>> steps;
    for (uint32_t step = 0; step < 500; ++step) {
      std::vector<int64_t> tokens;
      for (uint32_t rank = 0; rank < 4; ++rank) {
        tokens.push_back((step * 2654435761U >> (rank * 3)) % 4);
      }
      steps.push_back(testing::random_inputs(c, tokens, step));
    }
    const EpRun run = testing::run_ep(c, steps);
    ASSERT_EQ(testing::first_failure(run.outcomes), "");
    EXPECT_EQ(run.outputs, testing::plain_layers(c, steps.back()));
  }
}

TEST(Ep, SeveralThreadsPerRank_DoNotChangeABit) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 2,
                   .experts = 9,
                   .top_k = 4,
                   .hidden = 70,
                   .max_tokens = 150,
                   .transport = transport};
    const auto inputs = testing::random_inputs(c, {150, 67}, 99);
    const EpRun run = testing::run_ep(c, {inputs}, 3);
    ASSERT_EQ(testing::first_failure(run.outcomes), "");
    EXPECT_EQ(run.outputs, testing::plain_layers(c, inputs));
  }
}

TEST(Ep, Batch_OrdersRowsBySourceRankThenToken) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const EpCase c{.ranks = 3, .experts = 5, .top_k = 3, .transport = transport};
    const auto inputs = testing::random_inputs(c, {9, 4, 16}, 11);
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = c.ranks}), [&](int32_t rank, Communicator& communicator) {
          const auto at = static_cast<size_t>(rank);
          const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
          testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
          testing::SerialExecutor executor;
          const auto rows = testing::bundle_rows(inputs[at], c.hidden);
          const ExpertBatch batch = dispatcher->dispatch(
              {inputs[at].num_tokens, c.top_k, inputs[at].ids.data(), inputs[at].weights.data()},
              {reinterpret_cast<const std::byte*>(rows.data()), inputs[at].num_tokens,
               testing::float_row_bytes(c.hidden), DType::kF32},
              workspace.span(), executor);
          EXPECT_EQ(batch.layout, transport == EpTransport::kVariable ? BatchLayout::kContiguous
                                                                      : BatchLayout::kPadded);
          EXPECT_EQ(batch.num_local_experts, dispatcher->num_local_experts());
          EXPECT_LE(batch.num_slots, dispatcher->max_slots());
          for (int64_t e = 0; e < batch.num_local_experts; ++e) {
            for (int64_t i = 0; i < batch.expert_count[e]; ++i) {
              const int64_t slot = batch.expert_begin[e] + i;
              ASSERT_LT(slot, batch.num_slots);
              ASSERT_LT(batch.source_row[slot], batch.bundle.num_rows);
              // Both transports arrange rows by rank, then token.
              if (i > 0) {
                ASSERT_LT(batch.source_row[slot - 1], batch.source_row[slot]);
              }
            }
          }
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

TEST(Ep, SixteenBitRowsAndOutput_TravelUnchanged) {
  // The dispatcher moves bytes, so a two-byte row type only changes row_bytes.
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 2}), [](int32_t rank, Communicator& communicator) {
        dispatch::DispatchProblem problem{.max_tokens = 4,
                                          .top_k = 1,
                                          .num_experts = 2,
                                          .hidden_size = 32,
                                          .row_bytes = 64,
                                          .row_dtype = DType::kBF16,
                                          .ep_size = 2,
                                          .ep_rank = rank,
                                          .communicator = &communicator};
        const auto dispatcher =
            dispatch::dispatcher_catalog().find("ep.variable", "dispatcher").make(problem);
        testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
        testing::SerialExecutor executor;
        const std::vector<uint8_t> rows(64, static_cast<uint8_t>(rank + 1));
        const std::vector<int32_t> ids = {1 - rank};
        const std::vector<float> weights = {0.5F};
        const Routing routing{1, 1, ids.data(), weights.data()};
        const ExpertBatch batch = dispatcher->dispatch(
            routing, {reinterpret_cast<const std::byte*>(rows.data()), 1, 64, DType::kBF16},
            workspace.span(), executor);
        ASSERT_EQ(batch.expert_count[0], 1);
        EXPECT_EQ(batch.bundle.dtype, DType::kBF16);
        const std::byte* const row = batch.bundle.rows + batch.source_row[0] * 64;
        for (int i = 0; i < 64; ++i) EXPECT_EQ(static_cast<int>(row[i]), 2 - rank);
        std::vector<float> result(32, 3.0F);
        std::vector<uint16_t> out(32);
        dispatcher->combine({.output = {OutputTag::kPerRow, result.data(), 32},
                             .routing = routing,
                             .out = {out.data(), DType::kBF16, Shape{1, 32}, 0}},
                            workspace.span(), executor);
        EXPECT_EQ(out, std::vector<uint16_t>(32, 0x3fc0));  // 1.5
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST(Ep, SharedExperts_AreAddedAfterTheSum) {
  for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
    const EpCase c{.ranks = 2, .experts = 4, .top_k = 2, .combine = combine};
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 2}), [&](int32_t rank, Communicator& communicator) {
          const auto dispatcher = testing::make_dispatcher(c, rank, communicator);
          testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
          testing::SerialExecutor executor;
          testing::TokenInput input = testing::random_input(3, 2, 4, c.hidden, 31);
          std::fill(input.ids.begin(), input.ids.end(), -1);
          const auto rows = testing::bundle_rows(input, c.hidden);
          const Routing routing{3, 2, input.ids.data(), input.weights.data()};
          const ExpertBatch batch =
              dispatcher->dispatch(routing,
                                   {reinterpret_cast<const std::byte*>(rows.data()), 3,
                                    testing::float_row_bytes(c.hidden), DType::kF32},
                                   workspace.span(), executor);
          std::vector<float> outputs(static_cast<size_t>(batch.num_slots * c.hidden) + 1);
          std::vector<float> out(input.hidden.size());
          dispatcher->combine({.output = {OutputTag::kPerRow, outputs.data(), c.hidden},
                               .routing = routing,
                               .finish = {.shared = input.hidden.data(), .shared_stride = c.hidden},
                               .out = {out.data(), DType::kF32, Shape{3, c.hidden}, 0}},
                              workspace.span(), executor);
          EXPECT_EQ(out, input.hidden);
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }
}

}  // namespace
}  // namespace conclave
