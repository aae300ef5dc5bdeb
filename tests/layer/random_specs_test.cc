// Compares layers with every combination of parts, drawn at random, with float64 and with
// themselves: in chunks, in place and with shared experts apart.

#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::LayerOutput;
using testing::make_layer;
using testing::OwnedLayer;
using testing::parts_text;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::SpecDraw;

constexpr int64_t kTokens = 21;

class RandomSpec : public ::testing::TestWithParam<uint32_t> {
 protected:
  RandomSpec() {
    SpecDraw draw(GetParam());
    spec_ = draw.draw();
    isa_ = testing::usable_isas()[GetParam() % testing::usable_isas().size()];
    own_residual_ = spec_.residual.intermediate_size != 0 && draw.chance(2);
    hidden_ = random_tensor(spec_.weight_dtype, kTokens, spec_.hidden_size, GetParam());
    residual_ = random_tensor(DType::kF32, kTokens, spec_.hidden_size, GetParam() + 1000);
  }

  ForwardArgs args() const {
    ForwardArgs args;
    if (own_residual_) args.residual_input = residual_.const_view();
    return args;
  }
  OwnedLayer layer(int64_t max_tokens) const {
    return make_layer(spec_, {.max_tokens = max_tokens}, {.isa = isa_});
  }
  std::string trace() const { return parts_text(spec_) + ", " + isa_; }

  MoeSpec spec_;
  std::string isa_;
  bool own_residual_ = false;
  Tensor hidden_;
  Tensor residual_;
};

TEST_P(RandomSpec, Output_IsWithinTheBarOfFloat64) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(64);
  const LayerOutput output = run_layer(owned.layer, hidden_.view(), spec_.weight_dtype, args());
  LayerResult result = output.result(hidden_.const_view());
  result.residual_input = args().residual_input;
  const StageCheck check = check_against_reference(*owned.context, spec_, *owned.source, result);
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec_.weight_dtype, spec_.weight_dtype));
}

TEST_P(RandomSpec, Chunks_GiveTheBitsOfOneChunk) {
  SCOPED_TRACE(trace());
  const LayerOutput whole = run_layer(layer(64).layer, hidden_.view(), spec_.weight_dtype, args());
  const LayerOutput chunked = run_layer(layer(8).layer, hidden_.view(), spec_.weight_dtype, args());
  EXPECT_TRUE(same_bits(whole.out, chunked.out));
  EXPECT_TRUE(same_bits(whole.ids, chunked.ids));
  EXPECT_TRUE(same_bits(whole.weights, chunked.weights));
}

TEST_P(RandomSpec, InPlace_GivesTheBitsOfOutOfPlace) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(8);
  const LayerOutput expected = run_layer(owned.layer, hidden_.view(), spec_.weight_dtype, args());
  ForwardArgs in_place = args();
  in_place.hidden = hidden_.view();
  in_place.out = hidden_.view();
  owned.layer.forward(in_place);
  EXPECT_TRUE(same_bits(hidden_, expected.out));
}

TEST_P(RandomSpec, PaddingAndNumTokens_TouchNoOtherToken) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(8);
  const LayerOutput expected = run_layer(owned.layer, hidden_.view(), DType::kF32, args());
  Tensor mask(DType::kBool, {kTokens});
  for (int64_t i = 0; i < kTokens; ++i) mask.as<uint8_t>()[i] = i % 4 != 1;
  // Padding may hold anything.
  const size_t row_bytes = hidden_.size_bytes() / kTokens;
  for (int64_t i = 1; i < kTokens; i += 4) {
    std::memset(hidden_.as<std::byte>() + static_cast<size_t>(i) * row_bytes, 0xff, row_bytes);
  }
  const int64_t count = kTokens - 2;
  ForwardArgs masked = args();
  masked.padding_mask = mask.const_view();
  masked.num_tokens = &count;
  const LayerOutput output = run_layer(owned.layer, hidden_.view(), DType::kF32, masked);
  for (int64_t token = 0; token < count; ++token) {
    const auto row = testing::row_bytes(output.out, token);
    if (token % 4 != 1) {
      EXPECT_EQ(row, testing::row_bytes(expected.out, token)) << token;
      continue;
    }
    for (int64_t slot = 0; slot < num_slots(spec_); ++slot) {
      EXPECT_EQ(output.ids.as<int32_t>()[token * num_slots(spec_) + slot], -1);
    }
    const float* values = output.out.as<float>() + token * spec_.hidden_size;
    EXPECT_TRUE(std::all_of(values, values + spec_.hidden_size, [](float x) { return x == 0; }));
  }
}

TEST_P(RandomSpec, SharedApart_BothPartsAreWithinTheBar) {
  if (spec_.shared.mode == SharedMode::kNone) return;
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(8);
  Tensor shared(DType::kF32, {kTokens, spec_.hidden_size});
  ForwardArgs apart = args();
  apart.shared_out = shared.view();
  const LayerOutput output = run_layer(owned.layer, hidden_.view(), DType::kF32, apart);
  ReferenceResult reference =
      reference_forward(*owned.context, spec_, *owned.source,
                        {.hidden = hidden_.const_view(), .residual_input = args().residual_input});
  const double bar = accuracy_bar(spec_.weight_dtype, DType::kF32);
  EXPECT_LE(worst(token_errors(shared.view(), reference.shared)), bar);
  for (size_t i = 0; i < reference.residual.size(); ++i)
    reference.routed[i] += reference.residual[i];
  EXPECT_LE(worst(token_errors(output.out.view(), reference.routed)), bar);
}

TEST_P(RandomSpec, SkippedIds_ContributeNothing) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(8);
  LayerOutput given = run_layer(owned.layer, hidden_.view(), DType::kF32, args());
  for (int64_t i = 0; i < kTokens * num_slots(spec_); i += 3) given.ids.as<int32_t>()[i] = -1;
  // Runs with given weights, and weighed by the router, which alone weighs shared experts of
  // kRouterWeight.
  for (const bool with_weights : {false, true}) {
    if (with_weights && spec_.shared.mode == SharedMode::kRouterWeight) continue;
    ForwardArgs replay = args();
    ReferenceArgs expected{.hidden = hidden_.const_view(),
                           .topk_ids = given.ids.const_view(),
                           .residual_input = args().residual_input};
    replay.topk_ids = expected.topk_ids;
    if (with_weights) {
      replay.topk_weights = expected.topk_weights = given.weights.const_view();
    } else {
      replay.router_logits = expected.router_logits = given.logits.const_view();
    }
    const LayerOutput output = run_layer(owned.layer, hidden_.view(), DType::kF32, replay);
    const ReferenceResult reference =
        reference_forward(*owned.context, spec_, *owned.source, expected);
    EXPECT_LE(worst(token_errors(output.out.view(), reference.output)),
              accuracy_bar(spec_.weight_dtype, DType::kF32));
    EXPECT_TRUE(same_bits(output.ids, given.ids));
  }
}

TEST_P(RandomSpec, NoTokensAndOneToken_Work) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer(8);
  const LayerOutput expected = run_layer(owned.layer, hidden_.view(), DType::kF32, args());
  for (const int64_t tokens : {0, 1}) {
    ForwardArgs few = args();
    if (own_residual_) few.residual_input.shape = {tokens, spec_.hidden_size};
    ConstTensorView hidden = hidden_.const_view();
    hidden.shape = {tokens, spec_.hidden_size};
    const LayerOutput output = run_layer(owned.layer, hidden, DType::kF32, few);
    if (tokens == 1) {
      EXPECT_EQ(testing::row_bytes(output.out, 0), testing::row_bytes(expected.out, 0));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Draws, RandomSpec, ::testing::Range(0U, 60U));

}  // namespace
}  // namespace conclave
