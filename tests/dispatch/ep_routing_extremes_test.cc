// Tests skew, duplicates, sentinels and hostile ids under expert parallelism.
#include "dispatch/ep_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace conclave {
namespace {

using testing::EpCase;
using testing::EpRun;
using testing::TokenInput;

// Runs each transport on inputs whose ids id(rank, token, slot) sets, and expects the plain layer's
// bits.
void expect_plain(EpCase c, const std::function<int32_t(int64_t, int64_t, int64_t)>& id) {
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const auto placement : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
      c.transport = transport;
      c.placement = placement;
      SCOPED_TRACE(testing::describe(c));
      auto inputs = testing::random_inputs(c, {c.max_tokens}, 3);
      for (size_t rank = 0; rank < inputs.size(); ++rank) {
        for (size_t i = 0; i < inputs[rank].ids.size(); ++i) {
          const auto at = static_cast<int64_t>(i);
          inputs[rank].ids[i] = id(static_cast<int64_t>(rank), at / c.top_k, at % c.top_k);
        }
      }
      const EpRun run = testing::run_ep(c, {inputs, inputs});
      ASSERT_EQ(testing::first_failure(run.outcomes), "");
      EXPECT_EQ(run.outputs, testing::plain_layers(c, inputs));
    }
  }
}

TEST(EpExtremes, AllTokensToOneExpert_FillTheSlotBound) {
  for (const int32_t target : {0, 5, 9}) {
    expect_plain({.ranks = 4, .experts = 10, .top_k = 2},
                 [&](int64_t, int64_t, int64_t slot) { return slot == 0 ? target : -1; });
  }
}

TEST(EpExtremes, EveryExpertForEveryToken_IsLegal) {
  expect_plain({.ranks = 4, .experts = 10, .top_k = 10}, [](int64_t, int64_t token, int64_t slot) {
    return static_cast<int32_t>((token + slot) % 10);
  });
}

TEST(EpExtremes, SameExpertInAllSlots_AddsUp) {
  expect_plain({.ranks = 4, .experts = 4, .top_k = 4}, [](int64_t rank, int64_t token, int64_t) {
    return static_cast<int32_t>((rank + token) % 4);
  });
}

TEST(EpExtremes, RepeatsBetweenOthers_KeepSlotOrder) {
  const std::vector<int32_t> ids = {3, 0, 3, 1, 0, 3};
  expect_plain({.ranks = 2, .experts = 6, .top_k = 6},
               [&](int64_t, int64_t, int64_t slot) { return ids[static_cast<size_t>(slot)]; });
}

TEST(EpExtremes, AllSentinels_GiveZeros) {
  expect_plain({.ranks = 3, .experts = 5, .top_k = 2},
               [](int64_t, int64_t, int64_t) { return -1; });
}

TEST(EpExtremes, HostileIds_ContributeNothing) {
  const std::vector<int32_t> ids = {-1,
                                    -2,
                                    6,
                                    7,
                                    1 << 15,
                                    std::numeric_limits<int32_t>::min(),
                                    std::numeric_limits<int32_t>::max(),
                                    3};
  expect_plain({.ranks = 3, .experts = 6, .top_k = 4}, [&](int64_t, int64_t token, int64_t slot) {
    return ids[static_cast<size_t>(token * 4 + slot) % ids.size()];
  });
  std::mt19937 noise(17);
  expect_plain({.ranks = 2, .experts = 6, .top_k = 6},
               [&](int64_t, int64_t, int64_t) { return static_cast<int32_t>(noise()); });
}

TEST(EpExtremes, OneExpertPerRank_AndLocalExpertCountsOneToFive) {
  for (const int64_t experts : {2, 3, 5, 10}) {
    expect_plain({.ranks = 2, .experts = experts, .top_k = 2},
                 [&](int64_t rank, int64_t token, int64_t slot) {
                   return static_cast<int32_t>((rank + token + slot) % experts);
                 });
  }
}

TEST(EpExtremes, RepeatedExpertReducedPerRank_AddsItsWeights) {
  EpCase c{.ranks = 2, .experts = 2, .top_k = 2, .combine = EpCombine::kReducedPerRank};
  auto inputs = testing::random_inputs(c, {4}, 5);
  for (TokenInput& input : inputs) {
    // These are powers of two, so that the order of the sum does not matter.
    std::fill(input.weights.begin(), input.weights.end(), 0.5F);
    std::fill(input.ids.begin(), input.ids.end(), 1);
  }
  const EpRun run = testing::run_ep(c, {inputs});
  ASSERT_EQ(testing::first_failure(run.outcomes), "");
  EXPECT_EQ(run.outputs, testing::plain_layers(c, inputs));
}

TEST(EpExtremes, NonFiniteRowsAndWeights_StayWithTheirTokens) {
  for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
    const EpCase c{.ranks = 3, .experts = 6, .top_k = 3, .combine = combine};
    auto inputs = testing::random_inputs(c, {8}, 41);
    for (TokenInput& input : inputs) std::fill(input.ids.begin(), input.ids.end(), 4);
    const EpRun clean = testing::run_ep(c, {inputs});
    inputs[0].hidden[static_cast<size_t>(2 * c.hidden)] = std::numeric_limits<float>::infinity();
    inputs[2].weights[static_cast<size_t>(5 * c.top_k)] = std::numeric_limits<float>::quiet_NaN();
    const EpRun run = testing::run_ep(c, {inputs});
    for (size_t rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < run.outputs[rank].size(); ++i) {
        const size_t token = i / static_cast<size_t>(c.hidden);
        const size_t column = i % static_cast<size_t>(c.hidden);
        const bool hit = (rank == 0 && token == 2 && column == 0) || (rank == 2 && token == 5);
        if (hit) {
          EXPECT_FALSE(std::isfinite(run.outputs[rank][i]));
        } else {
          EXPECT_EQ(run.outputs[rank][i], clean.outputs[rank][i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave
