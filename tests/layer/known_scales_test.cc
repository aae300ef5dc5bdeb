// A layer takes its source's scales for what their type says.
#include "layer/known_scales.h"

#include "layer/float_scales.h"
#include "support/layer_fixture.h"
#include "support/role_sources.h"

#include "conclave/layer.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace conclave {
namespace {

using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;

MoeSpec spec_of(int64_t columns, bool has_global) {
  MoeSpec spec = make_spec(4, 2, 64, 64, DType::kF4);
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = columns,
                .has_global_scale = has_global};
  return spec;
}

TEST(KnownScales, TypesOfTheSource_SayWhatScalesAre) {
  const MoeSpec mxfp4 = spec_of(32, false);
  const MoeSpec nvfp4 = spec_of(16, true);
  const auto known = [](const MoeSpec& spec) {
    return with_known_scales(spec, *make_synthetic_source(spec, 3)).quant.scale_values;
  };
  EXPECT_EQ(known(mxfp4), ScaleValues::kPowerOfTwo);
  EXPECT_EQ(known(nvfp4), ScaleValues::kFloat8);
  EXPECT_EQ(known(spec_of(64, false)), ScaleValues::kFloat);
  EXPECT_EQ(known(make_spec(4, 2, 64, 64, DType::kBF16)), ScaleValues::kFloat);
}

TEST(KnownScales, WhatTheSpecPromises_Stays) {
  MoeSpec spec = spec_of(32, false);
  const auto source = make_synthetic_source(spec, 3);
  spec.quant.scale_values = ScaleValues::kF16;
  EXPECT_EQ(with_known_scales(spec, *source).quant.scale_values, ScaleValues::kF16);
}

TEST(KnownScales, OneMatrixOfAnotherType_MakesThemFloats) {
  const MoeSpec spec = spec_of(32, false);
  const auto base = make_synthetic_source(spec, 3);
  const testing::RedescribedSource mixed(*base, weights::kDown.with(WeightPlane::kScale),
                                         [](WeightInfo& info) { info.dtype = DType::kF32; });
  EXPECT_EQ(with_known_scales(spec, mixed).quant.scale_values, ScaleValues::kFloat);
}

TEST(KnownScales, ALayer_PlansForThemAndKeepsItsSpec) {
  const MoeSpec spec = spec_of(32, false);
  MoeSpec known = spec;
  known.quant.scale_values = ScaleValues::kPowerOfTwo;
  const Context context({.device = "cpu", .num_threads = 1});
  const auto source = make_synthetic_source(spec, 3);
  const MoeLayer layer = MoeLayer::create(context, spec, *source);
  EXPECT_EQ(layer.spec().quant, spec.quant);
  EXPECT_EQ(layer.with_max_tokens(7).spec().quant, spec.quant);
  const MoeLayer promised = MoeLayer::create(context, known, *source);
  EXPECT_EQ(layer.plan().packed_bytes, promised.plan().packed_bytes);
}

// A layer goes on with float32 scales that are such numbers.
TEST(KnownScales, AReload_BringsTheSameNumbersInAnotherType) {
  const MoeSpec spec = spec_of(32, false);
  const Context context({.device = "cpu", .num_threads = 1});
  MoeLayer layer = MoeLayer::create(context, spec, *make_synthetic_source(spec, 3));
  const Tensor hidden = random_tensor(DType::kBF16, 3, spec.hidden_size, 4);
  const Tensor first = run_layer(layer, hidden.view(), DType::kF32).out;
  const testing::FloatScales floats(make_synthetic_source(spec, 3));
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    layer.reload(floats, mode);
    EXPECT_TRUE(testing::same_bits(run_layer(layer, hidden.view(), DType::kF32).out, first));
  }
}

TEST(KnownScales, AReload_OfOtherNumbersIsRefusedWithTheWayOut) {
  const MoeSpec spec = spec_of(32, false);
  const Context context({.device = "cpu", .num_threads = 1});
  MoeLayer layer = MoeLayer::create(context, spec, *make_synthetic_source(spec, 3));
  const Tensor hidden = random_tensor(DType::kBF16, 3, spec.hidden_size, 4);
  const Tensor first = run_layer(layer, hidden.view(), DType::kF32).out;
  const testing::FloatScales floats(make_synthetic_source(spec, 3));
  const testing::FilledSource thirds(floats, weights::kDown.with(WeightPlane::kScale), 1, 1.0F / 3);
  try {
    layer.reload(thirds, ReloadMode::kStaged);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
    EXPECT_NE(error.detail().hint.find("float32 scales"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(testing::same_bits(run_layer(layer, hidden.view(), DType::kF32).out, first));
  static_cast<void>(MoeLayer::create(context, spec, thirds));
}

}  // namespace
}  // namespace conclave
