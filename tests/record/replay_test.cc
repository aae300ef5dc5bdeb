// Recorded routing given back to forwards of other batches has their bits, and comparisons say
// which tokens differ and how far.
#include "support/layer_parts.h"

#include "conclave/routing_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::LayerOutput;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

constexpr int64_t kTokens = 23;

std::vector<TokenKey> keys_of(const std::vector<int64_t>& rows) {
  std::vector<TokenKey> keys;
  for (const int64_t row : rows) keys.push_back({.sequence = row % 4, .position = row / 4});
  return keys;
}

std::vector<int64_t> all_rows() {
  std::vector<int64_t> rows(kTokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// A server runs batches as they come; a trainer has the same tokens in another order, other batches
// and another plan.
TEST(RoutingReplay, AnyBatch_HasTheBitsOfTheForwardThatWasRecorded) {
  for (uint32_t seed = 0; seed < 16; ++seed) {
    MoeSpec spec = testing::SpecDraw(seed).draw();
    if (spec.shared.mode == SharedMode::kRouterWeight) continue;  // its weights are more than k
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::parts_text(spec));
    const OwnedLayer server = make_layer(spec, {.max_tokens = 5});
    const OwnedLayer trainer = make_layer(spec, {.max_tokens = 64}, {.num_threads = 1});
    const Tensor hidden = random_tensor(spec.weight_dtype, kTokens, spec.hidden_size, seed);
    RoutingRecorder recorder(std::vector{RecordedLayer::of(2, spec)});
    const LayerOutput served = run_layer(server.layer, hidden.view(), DType::kF32);
    recorder.record(2, served.ids.view(), served.weights.view(), keys_of(all_rows()));
    const RoutingReplay replay(recorder.snapshot());

    std::vector<int64_t> rows = all_rows();
    std::shuffle(rows.begin(), rows.end(), std::mt19937(seed));
    rows.resize(kTokens / 2);
    const auto count = std::ssize(rows);
    Tensor ids(DType::kI32, {count, num_slots(spec)});
    Tensor weights(DType::kF32, {count, num_slots(spec)});
    replay.find(2, keys_of(rows), ids.view(), weights.view());
    const LayerOutput trained =
        run_layer(trainer.layer, testing::gather_rows(hidden, rows).view(), DType::kF32,
                  {.topk_ids = ids.view(), .topk_weights = weights.view()});
    EXPECT_TRUE(testing::same_bits(trained.out, testing::gather_rows(served.out, rows)));
  }
}

RoutingRecord small_record() {
  return {.model = {},
          .model_type = {},
          .layers = {{.layer = {.layer = 1, .num_ids = 6, .num_slots = 2},
                      .tokens = {{0, 0}, {0, 1}, {0, 0}},
                      .topk_ids = {0, 1, 2, 3, 4, 5},
                      .topk_weights = {0.5F, 0.5F, 0.75F, 0.25F, 0.625F, 0.375F}}}};
}

TEST(RoutingReplay, OfATokenRecordedTwice_TheLastRowCounts) {
  const RoutingReplay replay(small_record());
  Tensor ids(DType::kI32, {2, 2});
  replay.find(1, std::vector<TokenKey>{{0, 1}, {0, 0}}, ids.view(), {});
  const std::vector<int32_t> found(ids.as<int32_t>(), ids.as<int32_t>() + 4);
  EXPECT_EQ(found, (std::vector<int32_t>{2, 3, 4, 5}));
  EXPECT_TRUE(replay.has(1, {0, 1}));
  EXPECT_FALSE(replay.has(1, {1, 1}));
  EXPECT_FALSE(replay.has(2, {0, 1}));
}

TEST(RoutingReplay, WhatWasNotRecorded_IsRefusedBeforeAnythingIsWritten) {
  const RoutingReplay replay(small_record());
  Tensor ids(DType::kI32, {2, 2});
  Tensor weights(DType::kF32, {2, 2});
  ids.as<int32_t>()[0] = 77;
  const std::vector<TokenKey> known = {{0, 0}, {0, 1}};
  const std::vector<TokenKey> unknown = {{0, 0}, {5, 9}};
  const auto code = [&](int64_t layer, const std::vector<TokenKey>& tokens,
                        const TensorView& to_ids, const TensorView& to_weights) {
    return code_of([&] { replay.find(layer, tokens, to_ids, to_weights); });
  };
  using enum ErrorCode;
  EXPECT_EQ(code(0, known, ids.view(), {}), kInvalidArgument);
  EXPECT_EQ(code(1, unknown, ids.view(), weights.view()), kInvalidArgument);
  try {
    replay.find(1, unknown, ids.view(), {});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.detail().found, "sequence 5, position 9");
  }
  Tensor wide(DType::kI32, {2, 3});
  EXPECT_EQ(code(1, known, wide.view(), {}), kShape) << "a layer with another k";
  EXPECT_EQ(code(1, known, weights.view(), {}), kDType);
  EXPECT_EQ(code(1, known, ids.view(), ids.view()), kDType);
  EXPECT_EQ(ids.as<int32_t>()[0], 77);
  EXPECT_EQ(code(1, {}, {}, {}), ErrorCode{0}) << "no tokens are none too many";
}

TEST(RoutingReplay, RowsThatAreApart_AreWrittenApart) {
  const RoutingReplay replay(small_record());
  std::vector<int32_t> ids(6, 9);
  std::vector<float> weights(6, 9);
  replay.find(1, std::vector<TokenKey>{{0, 1}, {0, 0}},
              {.data = ids.data(), .dtype = DType::kI32, .shape = {2, 2}, .row_stride = 3},
              {.data = weights.data(), .dtype = DType::kF32, .shape = {2, 2}, .row_stride = 4});
  EXPECT_EQ(ids, (std::vector<int32_t>{2, 3, 9, 4, 5, 9}));
  EXPECT_EQ(weights, (std::vector<float>{0.75F, 0.25F, 9, 9, 0.625F, 0.375F}));
}

TEST(CompareRouting, Differences_AreCountedAndMeasured) {
  RoutingRecord first{
      .model = {},
      .model_type = {},
      .layers = {{.layer = {.layer = 1, .num_ids = 9, .num_slots = 2},
                  .tokens = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}},
                  .topk_ids = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1},
                  .topk_weights = {.5F, .5F, .75F, .25F, .5F, .5F, .5F, .5F, 1, 0}}}};
  RoutingRecord second = first;
  RecordedRows& rows = second.layers[0];
  std::ranges::reverse(rows.tokens);  // the order of rows does not matter
  for (size_t i = 0; i < 2; ++i) {
    for (size_t slot = 0; slot < 2; ++slot) {
      std::swap(rows.topk_ids[2 * i + slot], rows.topk_ids[2 * (4 - i) + slot]);
      std::swap(rows.topk_weights[2 * i + slot], rows.topk_weights[2 * (4 - i) + slot]);
    }
  }
  EXPECT_TRUE(compare_routing(first, second).equal());
  rows.topk_weights[6] = .5F;                     // token 1: expert 2 weighs 0.5 for 0.75
  rows.topk_ids[5] = 8;                           // token 2: expert 8 for 5
  std::swap(rows.topk_ids[2], rows.topk_ids[3]);  // token 3: other slots
  rows.tokens[4] = {1, 0};                        // token 0 is another one
  const RoutingComparison found = compare_routing(first, second, 2);
  ASSERT_EQ(found.layers.size(), 1U);
  const LayerDifferences& layer = found.layers[0];
  EXPECT_EQ(layer.compared, 4);
  EXPECT_EQ(layer.only_in_first, 1);
  EXPECT_EQ(layer.only_in_second, 1);
  EXPECT_EQ(layer.other_weights, 1);
  EXPECT_EQ(layer.other_experts, 1);
  EXPECT_EQ(layer.reordered, 1);
  EXPECT_EQ(layer.worst_weight_difference, 0.5) << "an expert that a side lacks weighs 0 there";
  EXPECT_EQ(layer.worst_token, (TokenKey{0, 2}));
  EXPECT_FALSE(found.equal());
  ASSERT_EQ(found.examples.size(), 2U) << "no more than asked for";
  EXPECT_EQ(found.examples[0].token, (TokenKey{0, 1}));
  EXPECT_EQ(found.examples[0].weight_difference, 0.25);
  EXPECT_EQ(found.examples[1].second_ids, (std::vector<int32_t>{4, 8}));
}

TEST(CompareRouting, LayersAndSpecs_AreComparedToo) {
  RoutingRecord first = small_record();
  first.layers[0].layer.spec_hash = 1;
  RoutingRecord second = first;
  second.layers[0].layer.spec_hash = 2;
  EXPECT_FALSE(compare_routing(first, second).layers[0].same_spec);
  second.layers[0].layer.spec_hash = 0;
  EXPECT_TRUE(compare_routing(first, second).layers[0].same_spec) << "nobody knows";
  EXPECT_TRUE(compare_routing(first, second).equal());
  EXPECT_TRUE(compare_routing(second, first).layers[0].same_spec) << "on neither side";
  second.layers[0].layer.layer = 4;
  const RoutingComparison apart = compare_routing(first, second);
  EXPECT_EQ(apart.only_in_first, (std::vector<int64_t>{1}));
  EXPECT_EQ(apart.only_in_second, (std::vector<int64_t>{4}));
  EXPECT_FALSE(apart.equal());
  second = first;
  second.layers[0].layer.num_slots = 1;
  second.layers[0].tokens.resize(6);
  EXPECT_EQ(code_of([&] { compare_routing(first, second); }), ErrorCode::kShape);
}

TEST(CompareRouting, NaN_IsFarFromNumbersAndEqualToItself) {
  RoutingRecord first = small_record();
  first.layers[0].topk_weights[2] = std::numeric_limits<float>::quiet_NaN();
  RoutingRecord second = first;
  EXPECT_TRUE(compare_routing(first, second).equal());
  second.layers[0].topk_weights[2] = 0.75F;
  const RoutingComparison found = compare_routing(first, second);
  EXPECT_TRUE(std::isnan(found.layers[0].worst_weight_difference));
  EXPECT_EQ(found.layers[0].worst_token, (TokenKey{0, 1}));
}

// Neither numbers of later experts nor those of later tokens take its place.
TEST(CompareRouting, NaN_StaysTheWorst) {
  RoutingRecord first = small_record();
  first.layers[0].tokens[2] = {0, 2};
  RoutingRecord second = first;
  first.layers[0].topk_weights[2] = std::numeric_limits<float>::quiet_NaN();
  second.layers[0].topk_weights[3] = 0.5F;
  second.layers[0].topk_weights[4] = 0.25F;
  const RoutingComparison found = compare_routing(first, second);
  ASSERT_EQ(found.examples.size(), 2U);
  EXPECT_TRUE(std::isnan(found.examples[0].weight_difference));
  EXPECT_EQ(found.examples[1].weight_difference, 0.375);
  EXPECT_TRUE(std::isnan(found.layers[0].worst_weight_difference));
  EXPECT_EQ(found.layers[0].worst_token, (TokenKey{0, 1}));
}

// Slot by slot: an expert that only the first record has, and slots that have none.
TEST(CompareRouting, AnExpertThatIsMissing_WeighsNothingOnItsSide) {
  RoutingRecord first = small_record();
  RoutingRecord second = first;
  second.layers[0].topk_ids[3] = -1;
  second.layers[0].topk_weights[3] = 9;
  const RoutingComparison found = compare_routing(first, second);
  ASSERT_EQ(found.examples.size(), 1U);
  EXPECT_EQ(found.examples[0].weight_difference, 0.25) << "a slot of no expert weighs nothing";
  second.layers[0].topk_ids[3] = 1;
  second.layers[0].topk_weights[3] = 0.125F;
  EXPECT_EQ(compare_routing(first, second).examples[0].weight_difference, 0.25);
}

}  // namespace
}  // namespace conclave
