#include "core/catalog.h"

#include "routing/router.h"
#include "routing/routing_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using routing::router_catalog;
using testing::router_spec;
using testing::RoutingProblem;
using testing::RoutingResult;

TEST(RouterCatalog, EveryRow_SupportsAProblemAndRoutesIt) {
  for (const auto& row : router_catalog().rows()) {
    SCOPED_TRACE(row.name);
    const MoeSpec spec = testing::spec_of_row(row.name);
    EXPECT_NO_THROW(validate(spec));
    EXPECT_TRUE(row.supports(spec)) << row.supports(spec).reason();
    for (const int64_t tokens : {0, 1, 33}) {
      testing::expect_equals_oracle(testing::random_problem(spec, tokens, 1.0F, 1));
    }
  }
}

TEST(RouterCatalog, EveryRow_IsFoundByItsName) {
  for (const auto& row : router_catalog().rows()) {
    EXPECT_EQ(routing::find_router(row.name), &row) << row.name;
  }
  EXPECT_EQ(routing::find_router("my own"), nullptr);
  MoeSpec own;
  own.router.name = "my own";
  EXPECT_EQ(routing::router_traits(own).token_ids, routing::TokenIds::kRead);
}

TEST(RouterCatalog, EveryRow_GivesTheSameBitsForAnyThreadsAndBatch) {
  for (const auto& row : router_catalog().rows()) {
    SCOPED_TRACE(row.name);
    const RoutingProblem whole_problem =
        testing::random_problem(testing::spec_of_row(row.name), 100, 1.0F, 7);
    const RoutingResult whole = testing::route(whole_problem);
    testing::SerialExecutor reversed(5);
    testing::ThreadExecutor threads(3);
    EXPECT_EQ(testing::route(whole_problem, reversed), whole);
    EXPECT_EQ(testing::route(whole_problem, threads), whole);
    for (const int64_t token : {0, 31, 32, 99}) {
      RoutingProblem alone = whole_problem;
      const int64_t columns = num_logits(alone.spec);
      const auto first = whole_problem.logits.begin() + token * columns;
      alone.logits.assign(first, first + columns);
      if (!alone.token_ids.empty()) alone.token_ids = {alone.token_ids[static_cast<size_t>(token)]};
      alone.first_token = token;
      const RoutingResult single = testing::route(alone);
      for (size_t j = 0; j < 2; ++j) {
        EXPECT_EQ(single.ids[j], whole.ids[static_cast<size_t>(token) * 2 + j]);
        EXPECT_EQ(single.weights[j], whole.weights[static_cast<size_t>(token) * 2 + j]);
      }
    }
  }
}

TEST(RouterCatalog, EveryRow_WeighsGivenIdsAsItsOwn) {
  for (const auto& row : router_catalog().rows()) {
    SCOPED_TRACE(row.name);
    RoutingProblem problem = testing::random_problem(testing::spec_of_row(row.name), 40, 1.0F, 3);
    const RoutingResult chosen = testing::route(problem);
    problem.given_ids = chosen.ids;
    const RoutingResult replayed = testing::route(problem);
    EXPECT_EQ(replayed.ids, chosen.ids);
    testing::expect_weights(replayed.weights, chosen.weights);
    // The router also accepts any other choice, with slots that hold none.
    std::mt19937 generator(5);
    for (int32_t& id : problem.given_ids) id = static_cast<int32_t>(generator() % 9) - 1;
    testing::expect_equals_oracle(problem);
  }
}

TEST(RouterCatalog, EveryRow_SurvivesAnyLogits) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {std::numeric_limits<float>::quiet_NaN(),
                                     kInf,
                                     -kInf,
                                     0.0F,
                                     -0.0F,
                                     1.0F,
                                     -2.0F,
                                     88.8F,
                                     -103.9F,
                                     3e38F,
                                     -3e38F,
                                     1e-45F};
  for (const auto& row : router_catalog().rows()) {
    RoutingProblem problem = testing::random_problem(testing::spec_of_row(row.name), 600, 1.0F, 3);
    std::mt19937 generator(29);
    for (float& logit : problem.logits) logit = values[generator() % values.size()];
    const auto columns = static_cast<size_t>(num_logits(problem.spec));
    for (size_t i = 0; i < 3 * columns; ++i) {
      problem.logits[i] = i % 2 == 0 ? values[0] : -kInf;
    }
    testing::expect_equals_oracle(problem);
  }
}

TEST(RouterCatalog, UnknownName_ListsTheKnownOnes) {
  try {
    router_catalog().find("top_k", "router");
    ADD_FAILURE() << "found a router that does not exist";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_NE(error.detail().expected.find("topk"), std::string::npos);
    EXPECT_EQ(error.detail().found, "top_k");
  }
}

TEST(RouterCatalog, TopKOutsideExperts_IsRefusedWithAReason) {
  const auto& row = router_catalog().find("topk", "router");
  for (const int64_t top_k : {0, -1, 9}) {
    const Support support = row.supports(router_spec(8, top_k, Renormalize::kSum));
    EXPECT_FALSE(support) << top_k;
    EXPECT_NE(support.reason().find(std::to_string(top_k)), std::string::npos);
  }
  EXPECT_TRUE(row.supports(router_spec(8, 8, Renormalize::kNone)));
  EXPECT_TRUE(row.supports(router_spec(1, 1, Renormalize::kNone)));
}

TEST(RouterCatalog, EveryRow_SaysWhyItCannot) {
  for (const auto& row : router_catalog().rows()) {
    SCOPED_TRACE(row.name);
    MoeSpec spec = testing::spec_of_row(row.name);
    spec.top_k = 9;
    spec.router.vocab_size = 0;
    const Support support = row.supports(spec);
    EXPECT_FALSE(support);
    EXPECT_FALSE(support.reason().empty());
  }
}

}  // namespace
}  // namespace conclave
