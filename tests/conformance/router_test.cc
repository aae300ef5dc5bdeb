// Every router of the catalog obeys its oracle, on random specs that its own row draws.
#include "routing/router_cases.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace conclave {
namespace {

using routing::router_catalog;
using routing::RouterRow;
using testing::RoutingProblem;

constexpr uint32_t kDraws = 200;

TEST(RouterRows, EveryDraw_IsLegalAndSupported) {
  for (const RouterRow& row : router_catalog().rows()) {
    int32_t chooses_all = 0;
    for (uint32_t seed = 0; seed < kDraws; ++seed) {
      std::mt19937 generator(seed);
      const MoeSpec spec = testing::drawn_spec(row, generator);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::describe(spec));
      ASSERT_EQ(spec.router.name, row.name);
      ASSERT_NO_THROW(validate(spec));
      const Support support = row.supports(spec);
      ASSERT_TRUE(support) << support.reason();
      chooses_all += spec.top_k == spec.num_experts + spec.num_zero_experts ? 1 : 0;
    }
    EXPECT_GT(chooses_all, 0) << row.name << " never draws k = E";
  }
}

TEST(RouterRows, RandomSpecs_EqualTheOracle) {
  for (const RouterRow& row : router_catalog().rows()) {
    for (uint32_t seed = 0; seed < kDraws; ++seed) {
      testing::for_each_problem(row, seed, [&](RoutingProblem& problem, const char* what) {
        SCOPED_TRACE(std::string(what) + ", seed " + std::to_string(seed));
        testing::expect_equals_oracle(problem);
      });
      if (HasFailure()) return;
    }
  }
}

// The weights of what a router chose do not depend on who chose it.
TEST(RouterRows, OwnChoices_AreWeighedAsChosen) {
  for (const RouterRow& row : router_catalog().rows()) {
    for (uint32_t seed = 0; seed < kDraws; ++seed) {
      std::mt19937 generator(seed);
      const MoeSpec spec = testing::drawn_spec(row, generator);
      const bool masks_by_zero =
          spec.router.num_groups > 1 && spec.router.group_mask == GroupMask::kZero;
      if (testing::may_cancel(spec.router) || masks_by_zero || spec.router.has_selection_bias) {
        continue;
      }
      SCOPED_TRACE("seed " + std::to_string(seed));
      RoutingProblem problem = testing::random_problem(spec, 9, 1.0F, seed);
      const testing::RoutingResult chosen = testing::route(problem);
      problem.given_ids = chosen.ids;
      const testing::RoutingResult replayed = testing::route(problem);
      ASSERT_EQ(replayed.ids, chosen.ids) << testing::describe(spec);
      if (spec.router.simulated.replay_weights.empty()) {
        testing::expect_weights(replayed.weights, chosen.weights);
      }
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace conclave
