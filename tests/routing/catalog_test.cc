#include "core/catalog.h"

#include "routing/router.h"
#include "routing/routing_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using routing::router_catalog;
using testing::router_spec;

TEST(RouterCatalog, EveryRow_SupportsAProblemAndRoutesIt) {
  for (const auto& row : router_catalog().rows()) {
    SCOPED_TRACE(row.name);
    MoeSpec spec = router_spec(8, 2, Renormalize::kSum);
    spec.router.name = std::string(row.name);
    EXPECT_TRUE(row.supports(spec)) << row.supports(spec).reason();
    const auto logits = testing::random_logits(5, 8, 1.0F, 1);
    EXPECT_EQ(testing::route(spec, logits).ids, testing::oracle(spec, logits).ids);
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

}  // namespace
}  // namespace conclave
