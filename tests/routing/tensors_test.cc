// The tensors that routers have of their own: every list of weights knows them by their row.
#include "routing/router.h"
#include "routing/router_tensors.h"
#include "routing/routing_problem.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

using routing::RouterRow;
using testing::RoutingProblem;

bool has_weight(const MoeSpec& spec, WeightId id) {
  const auto list = layer_weights(spec);
  return std::ranges::find(list, id, &WeightShape::id) != list.end();
}

TEST(RouterTensors, EveryOne_HasANameAndAnIdOfItsOwn) {
  std::set<std::string> names;
  for (const RouterRow& row : routing::router_catalog().rows()) {
    for (const routing::RouterTensor& tensor : row.tensors) {
      EXPECT_TRUE(names.insert(std::string(tensor.name)).second) << tensor.name;
      // Either a source has the values, or the spec.
      ASSERT_NE(tensor.id.has_value(), tensor.in_spec != nullptr) << tensor.name;
      if (!tensor.id) continue;
      EXPECT_EQ(routing::find_router_tensor(*tensor.id), &tensor);
      EXPECT_EQ(to_string(*tensor.id), tensor.name);
      EXPECT_TRUE(tensor.id->layer());
    }
  }
  EXPECT_EQ(router_tensors().size(), routing::all_router_tensors().size());
}

TEST(RouterTensors, LayersOfTheRow_HaveThemAndOthersDoNot) {
  for (const RouterRow& row : routing::router_catalog().rows()) {
    const MoeSpec spec = testing::spec_of_row(row.name);
    std::set<WeightId, bool (*)(WeightId, WeightId)> own(
        [](WeightId a, WeightId b) { return a.index() < b.index(); });
    for (const routing::SizedRouterTensor& tensor : routing::router_tensors_of(spec)) {
      if (tensor.tensor->id) own.insert(*tensor.tensor->id);
      ASSERT_TRUE(tensor.place) << row.name;
      EXPECT_EQ(tensor.tensor, &row.tensors[*tensor.place]);
    }
    for (const WeightId id : router_tensors()) {
      EXPECT_EQ(has_weight(spec, id), own.contains(id)) << row.name << ", " << to_string(id);
    }
  }
}

TEST(RouterTensors, RouterOfTheApplication_SeesThoseWithAPublicField) {
  MoeSpec spec = testing::router_spec(8, 2, Renormalize::kSum);
  spec.router.name = "my own";
  EXPECT_TRUE(routing::router_tensors_of(spec).empty());
  EXPECT_EQ(routing::router_traits(spec).num_token_ids, 0);
  spec.router.vocab_size = 5;
  const std::vector<routing::SizedRouterTensor> tensors = routing::router_tensors_of(spec);
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_FALSE(tensors[0].place);
  EXPECT_TRUE(has_weight(spec, weights::kHashTable));
  EXPECT_EQ(routing::router_traits(spec).num_token_ids, 5);
  const int32_t values[] = {1, 2};
  RouterWeights weights;
  routing::set_router_tensor(tensors[0], values, weights);
  EXPECT_EQ(weights.hash_table, values);
  for (const void* tensor : weights.tensors) EXPECT_EQ(tensor, nullptr);
}

TEST(RouterTensors, ExpertWeights_TakeThemByFieldOrByName) {
  const std::vector<float> matrix(8 * 2 * 6 * 8);
  const std::vector<int32_t> table(50 * 2);
  const ConstTensorView view{.data = table.data(), .dtype = DType::kI32, .shape = {50, 2}};
  ExpertWeights given{.gate_up = {.data = matrix.data(), .shape = {8, 12, 8}},
                      .down = {.data = matrix.data(), .shape = {8, 8, 6}}};
  EXPECT_EQ(make_pointer_source(given)->describe(weights::kHashTable).count, 0);
  given.router_tensors = {{"hash_table", view}};
  EXPECT_EQ(make_pointer_source(given)->describe(weights::kHashTable).rows, 50);
  given.router_tensors.clear();
  given.hash_table = view;
  EXPECT_EQ(make_pointer_source(given)->describe(weights::kHashTable).cols, 2);
  given.router_tensors = {{"dice", view}};
  try {
    make_pointer_source(given);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnknownName);
    EXPECT_EQ(error.detail().tensor, "dice");
  }
}

}  // namespace
}  // namespace conclave
