// A term with weight zero adds nothing, whatever its value; a gate product with a bias is rounded
// once.
#include "core/float_convert.h"
#include "support/layer_parts.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace conclave {
namespace {

using testing::FilledSource;
using testing::LayerOutput;
using testing::make_layer;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 11;
constexpr int64_t kHidden = 48;
constexpr int64_t kShared = 3;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

MoeSpec weighed_shared() {
  MoeSpec spec = testing::make_spec(6, 2, kHidden, 24, DType::kF32);
  spec.router = {.name = "sink_softmax",
                 .score = RouterScore::kSigmoid,
                 .has_selection_bias = true,
                 .scale = 8};
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 16, .count = kShared};
  return spec;
}

TEST(SharedFactor, ZeroKeepsASharedExpertThatIsNotFiniteOut) {
  const MoeSpec spec = weighed_shared();
  const Context context({.num_threads = 2});
  const auto source = make_synthetic_source(spec, 11);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 3);
  const auto layer_of = [&](const WeightSource& weights) {
    return MoeLayer::create(context, spec, weights, {.max_tokens = 4});
  };
  const MoeLayer ordinary = layer_of(*source);
  for (int64_t shared = 0; shared < kShared; ++shared) {
    SCOPED_TRACE(shared);
    const MoeLayer spoilt =
        layer_of(FilledSource(*source, weights::kSharedDown, shared, kInfinity));
    // Every second token has no weight for this shared expert.
    Tensor logits = random_tensor(DType::kF32, kTokens, num_logits(spec), 4);
    for (int64_t token = 0; token < kTokens; token += 2) {
      logits.as<float>()[token * num_logits(spec) + spec.num_experts + shared] = -kInfinity;
    }
    const ForwardArgs args{.router_logits = logits.const_view()};
    const LayerOutput expected = run_layer(ordinary, hidden.view(), DType::kF32, args);
    const LayerOutput output = run_layer(spoilt, hidden.view(), DType::kF32, args);
    for (int64_t token = 0; token < kTokens; ++token) {
      const float* row = output.out.as<float>() + token * kHidden;
      const bool finite = std::all_of(row, row + kHidden, [](float x) { return std::isfinite(x); });
      EXPECT_EQ(finite, token % 2 == 0) << "token " << token;
      if (token % 2 != 0) continue;
      EXPECT_EQ(testing::row_bytes(output.out, token), testing::row_bytes(expected.out, token));
    }
  }
}

float rounded(float value, DType dtype) {
  return dtype == DType::kBF16 ? bf16_to_float(float_to_bf16(value))
                               : f16_to_float(float_to_f16(value));
}

TEST(GateRounding, ProductAndBias_AreRoundedOnceTogether) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(to_string(dtype));
    MoeSpec plain = testing::make_spec(10, 3, kHidden, 24, DType::kF32);
    MoeSpec biased = plain;
    biased.router.has_logit_bias = true;
    biased.router.logits_dtype = dtype;
    const OwnedLayer with = make_layer(biased);
    const Context context({.num_threads = 1});
    const MoeLayer without = MoeLayer::create(context, plain, *with.source);
    Tensor stored(with.source->describe(weights::kRouterBias).dtype, {1, 10});
    with.source->read(weights::kRouterBias, 0, {.row_end = 1, .col_end = 10},
                      {stored.as<std::byte>(), stored.size_bytes()});
    Tensor bias(DType::kF32, {1, 10});
    convert(stored.view(), bias.view());

    const Tensor hidden = random_tensor(DType::kF32, 64, kHidden, 5);
    const Tensor products = run_layer(without, hidden.view(), DType::kF32).logits;
    const Tensor logits = run_layer(with.layer, hidden.view(), DType::kF32).logits;
    int64_t doubly_rounded_differ = 0;
    for (int64_t i = 0; i < 64 * 10; ++i) {
      const float product = products.as<float>()[i];
      const float b = bias.as<float>()[i % 10];
      EXPECT_EQ(logits.as<float>()[i], rounded(product + b, dtype)) << "logit " << i;
      doubly_rounded_differ +=
          rounded(rounded(product, dtype) + b, dtype) != rounded(product + b, dtype);
    }
    EXPECT_GT(doubly_rounded_differ, 20) << "the values do not tell the two roundings apart";
  }
}

}  // namespace
}  // namespace conclave
