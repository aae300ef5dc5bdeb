// Compares every checkpoint of testdata/quantised, with experts in codes as each method stores
// them, with outputs that tools/make_quantised.py computed in float64 from the same files, and
// integer codes with the weights that compressed-tensors decompressed.

#include "core/weight_types.h"
#include "layer/reference/float64_matrix.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/quantise.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

const std::filesystem::path kQuantised = "testdata/quantised";

struct Expected {
  const char* name;
  QuantSpec quant;
  std::string layout = "per_expert";
  std::optional<DType> shared = {};
  DType type = DType::kF8E4M3;
  // Beyond float64, where planes are float32 numbers that the method computes in another way.
  double rounding = 0;
};
void PrintTo(const Expected& expected, std::ostream* out) { *out << expected.name; }

constexpr auto kTensor = WeightScale::kTensor;
constexpr auto kChannel = WeightScale::kChannel;
constexpr auto kBlock = WeightScale::kBlock;
using enum ActivationScale;

constexpr double kOneRounding = 0x1p-22;

QuantSpec grouped(int64_t cols, WeightZero zeros = WeightZero::kNone) {
  return {.weights = kBlock, .block_rows = 1, .block_cols = cols, .zeros = zeros};
}
QuantSpec by_row(WeightZero zeros = WeightZero::kNone) {
  return {.weights = kChannel, .zeros = zeros};
}
QuantSpec by_token(QuantSpec spec, std::optional<DType> rows = std::nullopt) {
  spec.activations = kToken;
  spec.activation_dtype = rows;
  return spec;
}
QuantSpec in_order(QuantSpec spec) {
  spec.has_column_order = true;
  return spec;
}
QuantSpec with_rows(QuantSpec spec, int64_t group, RowScaleRule rule,
                    std::optional<DType> type = DType::kF4) {
  spec.activations = kGroup;
  spec.activation_group = group;
  spec.activation_scale_rule = rule;
  spec.activation_dtype = type;
  return spec;
}
QuantSpec rounded_up_rows(QuantSpec spec, int64_t group) {
  spec.activations = kGroup;
  spec.activation_group = group;
  spec.power_of_two_scales = true;
  return spec;
}
QuantSpec with_global_scale(QuantSpec spec) {
  spec.has_global_scale = true;
  return spec;
}
QuantSpec nvfp4_with_rows() {
  return with_rows(with_global_scale(grouped(16)), 16, RowScaleRule::kTwoLevel);
}
QuantSpec with_factors(QuantSpec spec) {
  spec.has_column_factors = true;
  return spec;
}
Expected coded(const char* name, DType type, const QuantSpec& spec, double rounding = 0) {
  return {.name = name, .quant = spec, .type = type, .rounding = rounding};
}
QuantSpec with_static_rows(QuantSpec spec) {
  spec.activations = kTensorStatic;
  return spec;
}
Expected mlx(const char* name, DType type, int64_t group) {
  QuantSpec spec = grouped(group, WeightZero::kOffset);
  spec.signed_scales = true;
  return {.name = name,
          .quant = spec,
          .layout = "stacked_unfused",
          .type = type,
          .rounding = kOneRounding};
}
Expected interleaved(const char* name) {
  // The parameters of its activation are rounded to float32, which the goldens' are not.
  return {.name = name,
          .quant = grouped(32),
          .layout = "stacked_interleaved",
          .type = DType::kF4,
          .rounding = kOneRounding / 16};
}
Expected fp4_experts(const char* name) {
  QuantSpec spec = grouped(32);
  spec.activations = kGroup;
  spec.power_of_two_scales = true;
  return {.name = name, .quant = spec};
}
Expected in_squares(const char* name, int64_t size) {
  return {.name = name, .quant = {.weights = kBlock, .block_rows = size, .block_cols = size}};
}
constexpr auto kPoint = WeightZero::kPoint;

const std::vector<Expected> kCheckpoints = {
    {"deepseek_v3-fp8-block",
     {.weights = kBlock, .activations = kGroup, .power_of_two_scales = true},
     "per_expert"},
    fp4_experts("deepseek_v4-fp4"),
    fp4_experts("deepseek_v4-fp4-wide"),
    interleaved("gpt_oss-mxfp4"),
    interleaved("gpt_oss-mxfp4-wide"),
    coded("mixtral-awq-gemv-group128", DType::kI4, grouped(128, kPoint)),
    coded("mixtral-awq-group128", DType::kI4, grouped(128, kPoint)),
    coded("mixtral-awq-symmetric", DType::kI4, grouped(32)),
    coded("mixtral-bnb-fp4", DType::kBnbFP4, grouped(32)),
    coded("mixtral-bnb-fp4-blocks32", DType::kBnbFP4, grouped(32)),
    coded("mixtral-bnb-fp4-nested-router", DType::kBnbFP4, grouped(32)),
    coded("mixtral-bnb-int8", DType::kI8, by_row(), kOneRounding),
    coded("mixtral-bnb-nf4-nested", DType::kNF4, grouped(32)),
    in_squares("mixtral-compressed-block32", 32),
    {"mixtral-compressed-channel", {.weights = kChannel, .activations = kToken}, "per_expert"},
    coded("mixtral-compressed-int4-asymmetric-group8", DType::kI4, grouped(8, kPoint)),
    coded("mixtral-compressed-int4-order", DType::kI4, in_order(grouped(16))),
    coded("mixtral-compressed-int8-asymmetric", DType::kI8, by_row(kPoint)),
    coded("mixtral-compressed-int8-asymmetric-token", DType::kI8, by_token(by_row(kPoint))),
    coded("qwen3_moe-compressed-int4-e4m3-rows", DType::kI4, by_token(grouped(32), DType::kF8E4M3)),
    {"mixtral-compressed-int8-rows32",
     {.weights = kChannel, .activations = kGroup, .activation_group = 32},
     "per_expert",
     {},
     DType::kI8},
    {"mixtral-compressed-int8-token",
     {.weights = kChannel, .activations = kToken},
     "per_expert",
     {},
     DType::kI8},
    coded("mixtral-compressed-mxfp4", DType::kF4, grouped(32)),
    coded("mixtral-compressed-mxfp8", DType::kF8E4M3, grouped(32)),
    coded("mixtral-compressed-nvfp4", DType::kF4, with_global_scale(grouped(16)), kOneRounding),
    coded("mixtral-compressed-packed-int8-channel", DType::kI8, by_row()),
    coded("mixtral-gptq-int2-group128", DType::kI4, grouped(128)),
    coded("mixtral-gptq-int3", DType::kI4, grouped(32, kPoint)),
    coded("mixtral-gptq-int4-group128-asymmetric", DType::kI4, grouped(128, kPoint)),
    coded("mixtral-gptq-int4-order", DType::kI4, in_order(grouped(128, kPoint))),
    coded("mixtral-gptq-int8", DType::kI8, grouped(32)),
    coded("mixtral-mixed-mxfp4-fp8-down", DType::kF8E4M3, grouped(32)),
    coded("mixtral-modelopt-awq-group128", DType::kI4, with_factors(grouped(128))),
    coded("mixtral-modelopt-awq-rows", DType::kF8E4M3, with_static_rows(with_factors(grouped(64)))),
    coded("mixtral-modelopt-awq-rows-calibrated", DType::kF8E4M3,
          with_static_rows(with_factors(grouped(64)))),
    {"mixtral-modelopt-block", {.weights = kBlock}, "per_expert"},
    {"mixtral-modelopt-channel", {.weights = kChannel, .activations = kToken}, "per_expert"},
    {"mixtral-modelopt-fp8", {.weights = kTensor, .activations = kTensorStatic}, "per_expert"},
    coded("mixtral-modelopt-mxfp8", DType::kF8E4M3, rounded_up_rows(grouped(32), 32)),
    coded("mixtral-modelopt-nvfp4", DType::kF4, nvfp4_with_rows(), kOneRounding),
    coded("mixtral-quark-fp4", DType::kF4, grouped(32)),
    coded("mixtral-quark-fp6-e2m3-rows-up", DType::kF8E4M3,
          with_rows(grouped(32), 32, RowScaleRule::kCeilPower, DType::kF6E2M3)),
    coded("mixtral-quark-fp6-e3m2", DType::kF8E4M3, grouped(32)),
    coded("mixtral-quark-fp6-e3m2-rows", DType::kF8E4M3,
          with_rows(grouped(32), 32, RowScaleRule::kFloorPower, DType::kF6E3M2)),
    coded("mixtral-quark-int8-static", DType::kI8, with_static_rows({.weights = kTensor})),
    coded("mixtral-quark-uint4", DType::kI4, grouped(128, kPoint)),
    coded("mixtral-quark-uint8", DType::kI8, by_row(kPoint)),
    coded("qwen2_moe-bnb-int8-shared", DType::kI8, by_row(), kOneRounding),
    // The gate is decoded to float32.
    coded("qwen2_moe-bnb-nf4-shared", DType::kNF4, grouped(32), kOneRounding),
    {"qwen2_moe-compressed-int4-shared-bf16",
     {.weights = kBlock, .block_rows = 1, .block_cols = 32},
     "per_expert",
     DType::kBF16,
     DType::kI4},
    {"qwen2_moe-mixed-shared", grouped(32), "per_expert", DType::kF32, DType::kI4},
    {"qwen2_moe-fp8-block-shared-bf16",
     {.weights = kBlock, .activations = kGroup},
     "per_expert",
     DType::kBF16},
    coded("qwen3_moe-awq-gemv", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-awq-group32", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-bnb-fp4-nested-straddling", DType::kBnbFP4, grouped(8)),
    coded("qwen3_moe-bnb-int8", DType::kI8, by_row(), kOneRounding),
    coded("qwen3_moe-bnb-int8-router", DType::kI8, by_row(), kOneRounding),
    coded("qwen3_moe-bnb-nf4", DType::kNF4, grouped(64)),
    coded("qwen3_moe-bnb-nf4-bf16-storage", DType::kNF4, grouped(32)),
    coded("qwen3_moe-bnb-nf4-nested-blocks128", DType::kNF4, grouped(32)),
    coded("qwen3_moe-bnb-nf4-router", DType::kNF4, grouped(8)),
    coded("qwen3_moe-bnb-nf4-straddling", DType::kNF4, grouped(8)),
    {"qwen3_moe-compressed-block", {.weights = kBlock, .activations = kGroup}, "per_expert"},
    in_squares("qwen3_moe-compressed-block64", 64),
    {"qwen3_moe-compressed-block64-rows",
     {.weights = kBlock,
      .block_rows = 64,
      .block_cols = 64,
      .activations = kGroup,
      .activation_group = 64},
     "per_expert"},
    coded("qwen3_moe-compressed-int4-asymmetric", DType::kI4, grouped(32, kPoint)),
    {"qwen3_moe-compressed-int4-group128",
     {.weights = kBlock, .block_rows = 1},
     "per_expert",
     {},
     DType::kI4},
    {"qwen3_moe-compressed-int4-group32",
     {.weights = kBlock, .block_rows = 1, .block_cols = 32},
     "per_expert",
     {},
     DType::kI4},
    coded("qwen3_moe-compressed-int4-order", DType::kI4, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-compressed-int8-asymmetric", DType::kI8, by_row(kPoint)),
    {"qwen3_moe-compressed-int8-channel", {.weights = kChannel}, "per_expert", {}, DType::kI8},
    coded("qwen3_moe-compressed-mxfp4", DType::kF4, grouped(32)),
    coded("qwen3_moe-compressed-mxfp4-rows", DType::kF4,
          with_rows(grouped(32), 32, RowScaleRule::kEvenPower)),
    coded("qwen3_moe-compressed-mxfp8", DType::kF8E4M3, grouped(32)),
    coded("qwen3_moe-compressed-mxfp8-rows", DType::kF8E4M3,
          with_rows(grouped(32), 32, RowScaleRule::kHalfPower, std::nullopt)),
    coded("qwen3_moe-compressed-nvfp4", DType::kF4, with_global_scale(grouped(16)), kOneRounding),
    coded("qwen3_moe-compressed-nvfp4-rows", DType::kF4, nvfp4_with_rows(), kOneRounding),
    coded("qwen3_moe-compressed-packed-int8-asymmetric", DType::kI8, grouped(16, kPoint)),
    {"qwen3_moe-compressed-tensor-static",
     {.weights = kTensor, .activations = kTensorStatic},
     "per_expert"},
    {"qwen3_moe-compressed-weight-only", {.weights = kChannel}, "per_expert"},
    {"qwen3_moe-fp8-stacked", {.weights = kBlock, .activations = kGroup}, "stacked"},
    {"qwen3_moe-fp8-static-stacked", {.weights = kTensor, .activations = kTensorStatic}, "stacked"},
    coded("qwen3_moe-gptq-int2", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-gptq-int2-order", DType::kI4, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-gptq-int3-channel", DType::kI4, by_row()),
    coded("qwen3_moe-gptq-int3-order", DType::kI4, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-gptq-int4-channel", DType::kI4, by_row()),
    coded("qwen3_moe-gptq-int4-group32", DType::kI4, grouped(32)),
    coded("qwen3_moe-gptq-int4-order", DType::kI4, in_order(grouped(32))),
    coded("qwen3_moe-gptq-int8-asymmetric", DType::kI8, grouped(32, kPoint)),
    coded("qwen3_moe-gptq-int8-order", DType::kI8, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-gptq-v2-int2", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-gptq-v2-int3", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-gptq-v2-int3-order", DType::kI4, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-gptq-v2-int4", DType::kI4, grouped(32, kPoint)),
    coded("qwen3_moe-gptq-v2-int4-order", DType::kI4, in_order(grouped(32, kPoint))),
    coded("qwen3_moe-mixed-experts", DType::kF32, {}, kOneRounding),
    coded("qwen3_moe-mixed-int4-int8-down", DType::kI8, grouped(32)),
    mlx("qwen2_moe-mlx-4bit-shared", DType::kI4, 64),
    mlx("qwen3_moe-mlx-2bit", DType::kI4, 128),
    mlx("qwen3_moe-mlx-3bit", DType::kI4, 64),
    mlx("qwen3_moe-mlx-4bit", DType::kI4, 64),
    mlx("qwen3_moe-mlx-4bit-router8", DType::kI4, 32),
    mlx("qwen3_moe-mlx-5bit", DType::kI8, 32),
    mlx("qwen3_moe-mlx-6bit-router", DType::kI8, 32),
    mlx("qwen3_moe-mlx-8bit", DType::kI8, 64),
    coded("qwen3_moe-modelopt-awq", DType::kI4, with_factors(grouped(32))),
    coded("qwen3_moe-modelopt-mxfp8", DType::kF8E4M3, rounded_up_rows(grouped(32), 32)),
    coded("qwen3_moe-modelopt-nvfp4", DType::kF4, nvfp4_with_rows(), kOneRounding),
    coded("qwen3_moe-quark-channel-int4", DType::kI4, by_row()),
    coded("qwen3_moe-quark-fp4", DType::kF4, grouped(32)),
    coded("qwen3_moe-quark-fp4-rows", DType::kF4,
          with_rows(grouped(32), 32, RowScaleRule::kEvenPower)),
    coded("qwen3_moe-quark-fp6-e2m3", DType::kF8E4M3, grouped(32)),
    coded("qwen3_moe-quark-int4", DType::kI4, grouped(32)),
    coded("qwen3_moe-quark-int8-token", DType::kI8, {.weights = kChannel, .activations = kToken}),
};
std::vector<double> as_doubles(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.shape().num_elements()));
  convert(tensor.view(), {.data = values.data(), .dtype = DType::kF64, .shape = tensor.shape()});
  return values;
}

class Quantised : public ::testing::TestWithParam<Expected> {
 protected:
  Quantised()
      : directory_(kQuantised / GetParam().name),
        checkpoint_(Checkpoint::open(directory_)),
        file_(SafetensorsFile::open(directory_ / "golden.safetensors")),
        hidden_(file_.load("hidden_states")),
        ids_(file_.load("topk_ids")),
        weights_(file_.load("topk_weights")),
        expected_(as_doubles(file_.load("float64.output"))) {}

  const CheckpointLayer& layer() const { return checkpoint_.layers().front(); }

  // The routing is given; the recorded weights come from no router.
  Tensor forward(const MoeLayer& moe_layer, DType out_dtype) const {
    Tensor out(out_dtype, {hidden_.shape()[0], moe_layer.spec().hidden_size});
    moe_layer.forward({.hidden = hidden_.view(),
                       .topk_ids = ids_.view(),
                       .topk_weights = weights_.view(),
                       .out = out.view()});
    return out;
  }

  std::filesystem::path directory_;
  Checkpoint checkpoint_;
  SafetensorsFile file_;
  Tensor hidden_, ids_, weights_;
  std::vector<double> expected_;
};

// Some files have the router in codes too, of a width of its own, and a layer its values.
TEST_P(Quantised, RouterInCodes_HasItsValues) {
  if (file_.find("router") == nullptr) GTEST_SKIP() << "the router is stored as values";
  const std::vector<double> expected = as_doubles(file_.load("router"));
  const auto source = checkpoint_.layer_source(layer().index);
  const WeightInfo info = source->describe(weights::kRouter);
  Tensor router(info.dtype, {layer().spec.num_experts, layer().spec.hidden_size});
  source->read(weights::kRouter, 0, {0, info.rows, 0, info.cols},
               {router.as<std::byte>(), router.size_bytes()});
  const std::vector<double> found = as_doubles(router);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 0x1p-22 * std::abs(expected[i])) << i;
  }
}

TEST_P(Quantised, Spec_IsAsTheConfigurationSays) {
  const MoeSpec& spec = layer().spec;
  const QuantSpec& wanted = GetParam().quant;
  EXPECT_TRUE(layer().support) << layer().support.reason();
  EXPECT_EQ(layer().layout, GetParam().layout);
  EXPECT_EQ(spec.weight_dtype, GetParam().type);
  EXPECT_GE(checkpoint_.total_parameters(), static_cast<uint64_t>(layer().parameters.total))
      << "codes count, not the words that hold them";
  EXPECT_EQ(spec.quant.weights, wanted.weights);
  EXPECT_EQ(spec.quant.activations, wanted.activations);
  EXPECT_EQ(spec.quant.activation_group, wanted.activation_group);
  EXPECT_EQ(spec.quant.block_rows, wanted.block_rows);
  EXPECT_EQ(spec.quant.block_cols, wanted.block_cols);
  EXPECT_EQ(spec.quant.activation_dtype, wanted.activation_dtype);
  EXPECT_EQ(spec.quant.activation_scale_rule, wanted.activation_scale_rule);
  EXPECT_EQ(spec.quant.power_of_two_scales, wanted.power_of_two_scales);
  EXPECT_EQ(spec.quant.signed_scales, wanted.signed_scales);
  EXPECT_EQ(spec.quant.zeros, wanted.zeros);
  EXPECT_EQ(spec.quant.has_global_scale, wanted.has_global_scale);
  EXPECT_EQ(spec.quant.has_column_order, wanted.has_column_order);
  EXPECT_EQ(spec.quant.has_column_factors, wanted.has_column_factors);
  EXPECT_EQ(spec.shared.weight_dtype, GetParam().shared);
}

TEST_P(Quantised, Oracle_EqualsTheIndependentComputation) {
  const Context context({.num_threads = 2});
  const auto source = checkpoint_.layer_source(layer().index);
  const ReferenceResult result = reference_forward(
      context, layer().spec, *source,
      {.hidden = hidden_.view(), .topk_ids = ids_.view(), .topk_weights = weights_.view()});
  Tensor output(DType::kF64, {hidden_.shape()[0], layer().spec.hidden_size});
  std::copy(result.output.begin(), result.output.end(), output.as<double>());
  EXPECT_LE(worst(token_errors(output.view(), expected_)), 1e-12 + GetParam().rounding);
}

TEST_P(Quantised, Layer_IsWithinTheBar) {
  const Context context({.num_threads = 2});
  const auto source = checkpoint_.layer_source(layer().index);
  const MoeLayer moe_layer = MoeLayer::create(context, layer().spec, *source);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor out = forward(moe_layer, dtype);
    EXPECT_LE(worst(token_errors(out.view(), expected_)), accuracy_bar(GetParam().type, dtype));
  }
}

// GPTQModel's own weights, which lie beside small models: the same bits, since a code less its zero
// point times a float16 scale is exact in float32.
TEST(Gptq, Values_AreThePackagesOwn) {
  int models = 0;
  for (const auto& folder : std::filesystem::directory_iterator(kQuantised)) {
    if (!std::filesystem::exists(folder.path() / "dequantised.safetensors")) continue;
    SCOPED_TRACE(folder.path());
    ++models;
    const SafetensorsFile own = SafetensorsFile::open(folder.path() / "dequantised.safetensors");
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    const CheckpointLayer& layer = checkpoint.layers().front();
    const auto source = checkpoint.layer_source(layer.index);
    const std::vector<StoredMatrix> matrices = checkpoint.stored_matrices(layer.index);
    ASSERT_EQ(matrices.size(), own.tensors().size());
    for (const StoredMatrix& matrix : matrices) {
      const Tensor expected = own.load(matrix.module);
      const WeightInfo info = source->describe(matrix.id);
      ASSERT_EQ(expected.shape()[0], info.rows);
      std::vector<float> values(static_cast<size_t>(info.rows * info.cols));
      read_values(layer.spec.quant, *source, matrix.id, matrix.expert, {0, info.rows, 0, info.cols},
                  values);
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], expected.as<float>()[i]) << matrix.module << ", element " << i;
      }
    }
  }
  EXPECT_EQ(models, 7);
}

std::vector<std::byte> read_all(const WeightSource& source, WeightId role, int64_t expert) {
  const WeightInfo info = source.describe(role);
  const int64_t bits = info.rows * info.cols * bit_size(info.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(bits / 8));
  source.read(role, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

float integer_at(const std::vector<std::byte>& codes, size_t index, DType type) {
  if (type == DType::kI8) return static_cast<float>(static_cast<int8_t>(codes[index]));
  const auto pair = static_cast<uint8_t>(codes[index / 2]);
  return static_cast<float>(index % 2 == 0 ? pair & 0xf : pair >> 4) - 8;
}

// The weights of an expert as compressed-tensors has them: code times scale in the scale's type.
Tensor decompress(const WeightSource& source, WeightId role, WeightId scale_role, int64_t expert) {
  const WeightInfo info = source.describe(role);
  const WeightInfo scale_info = source.describe(scale_role);
  const std::vector<std::byte> codes = read_all(source, role, expert);
  const std::vector<std::byte> stored = read_all(source, scale_role, expert);
  Tensor scales(DType::kF32, {scale_info.rows, scale_info.cols});
  convert({.data = stored.data(), .dtype = scale_info.dtype, .shape = scales.shape()},
          scales.view());
  const int64_t group = info.cols / scale_info.cols;
  Tensor exact(DType::kF32, {info.rows, info.cols});
  for (int64_t i = 0; i < info.rows * info.cols; ++i) {
    exact.as<float>()[i] =
        integer_at(codes, static_cast<size_t>(i), info.dtype) * scales.as<float>()[i / group];
  }
  Tensor weights(scale_info.dtype, {info.rows, info.cols});
  convert(exact.view(), weights.view());
  return weights;
}

// FNV-1a.
int64_t digest(const Tensor& tensor) {
  uint64_t value = 0xcbf29ce484222325;
  for (const std::byte byte : std::span(tensor.as<std::byte>(), tensor.size_bytes())) {
    value = (value ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  }
  return static_cast<int64_t>(value);
}

class IntegerCodes : public Quantised {};

TEST_P(IntegerCodes, Weights_AreThoseOfThePackageToTheBit) {
  const auto source = checkpoint_.layer_source(layer().index);
  const int64_t experts = layer().spec.num_experts;
  using namespace weights;
  for (const auto& [name, role, scale] :
       {std::tuple{"decompressed.gate", kGate, kGate.with(WeightPlane::kScale)},
        {"decompressed.up", kUp, kUp.with(WeightPlane::kScale)},
        {"decompressed.down", kDown, kDown.with(WeightPlane::kScale)}}) {
    const Tensor wanted = file_.load(name);
    ASSERT_EQ(wanted.shape()[0], experts);
    for (int64_t expert = 0; expert < experts; ++expert) {
      EXPECT_EQ(digest(decompress(*source, role, scale, expert)), wanted.as<int64_t>()[expert])
          << name << " of expert " << expert;
    }
  }
}

// Files whose golden has an array of this name.
std::vector<Expected> checkpoints_with(const std::string& array) {
  std::vector<Expected> rows = kCheckpoints;
  std::erase_if(rows, [&](const Expected& row) {
    const auto file = SafetensorsFile::open(kQuantised / row.name / "golden.safetensors");
    return file.find(array) == nullptr;
  });
  return rows;
}

std::vector<Expected> exact_checkpoints_with(const std::string& array) {
  std::vector<Expected> rows = checkpoints_with(array);
  std::erase_if(rows, [](const Expected& row) { return row.rounding >= kOneRounding; });
  return rows;
}

// Packages count factors of rows as a part of the weights.
void multiply_columns(Float64Matrix& matrix, const WeightSource& source, WeightId id,
                      int64_t expert) {
  if (source.describe(id).count == 0) return;
  const Float64Matrix factors = read_float64(source, id, expert);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t col = 0; col < matrix.cols; ++col) matrix.row(row)[col] *= factors.row(0)[col];
  }
}

// A weight as the method's package decodes it, in float64.
class DecodedWeights : public Quantised {};

TEST_P(DecodedWeights, Weights_AreThoseOfThePackageToTheBit) {
  const auto source = checkpoint_.layer_source(layer().index);
  const int64_t experts = layer().spec.num_experts;
  for (const auto& [name, id] : {std::pair{"weights.gate", weights::kGate},
                                 {"weights.up", weights::kUp},
                                 {"weights.down", weights::kDown}}) {
    const Tensor wanted = file_.load(name);
    ASSERT_EQ(wanted.shape()[0], experts);
    for (int64_t expert = 0; expert < experts; ++expert) {
      Float64Matrix read = is_plain(layer().spec.weight_dtype)
                               ? read_float64(*source, id, expert)
                               : read_scaled(layer().spec.quant, *source, id, expert);
      Tensor values(DType::kF64, {read.rows, read.cols});
      multiply_columns(read, *source, id.with(WeightPlane::kColumnFactor), expert);
      // A zero counts as positive.
      std::transform(read.values.begin(), read.values.end(), values.as<double>(),
                     [](double value) { return value + 0.0; });
      EXPECT_EQ(digest(values), wanted.as<int64_t>()[expert]) << name << " of expert " << expert;
    }
  }
}

// Slices and rows one by one are what the whole matrix has there.
TEST_P(Quantised, Blocks_AreThoseOfTheMatrix) {
  const auto source = checkpoint_.layer_source(layer().index);
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source->describe(id);
    if (info.count == 0) continue;
    const int64_t bits = bit_size(info.dtype);
    const int64_t expert = info.count - 1;
    const std::vector<std::byte> whole = read_all(*source, id, expert);
    const int64_t half = info.cols / 2 / 8 * 8;
    if (half == 0) continue;
    for (int64_t row = 0; row < info.rows; ++row) {
      std::vector<std::byte> part(static_cast<size_t>(half * bits / 8));
      source->read(id, expert, {row, row + 1, half, 2 * half}, part);
      const auto begin = (row * info.cols + half) * bits / 8;
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin))
          << to_string(id) << " row " << row;
    }
  }
}

std::string test_name(const ::testing::TestParamInfo<Expected>& test) {
  std::string name = test.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Quantised, ::testing::ValuesIn(kCheckpoints), test_name);
INSTANTIATE_TEST_SUITE_P(Checkpoints, IntegerCodes,
                         ::testing::ValuesIn(checkpoints_with("decompressed.gate")), test_name);
INSTANTIATE_TEST_SUITE_P(Checkpoints, DecodedWeights,
                         ::testing::ValuesIn(exact_checkpoints_with("weights.gate")), test_name);

TEST(QuantisedFolders, EachHasItsRow) {
  std::vector<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(kQuantised)) {
    if (entry.is_directory()) folders.push_back(entry.path().filename().string());
  }
  std::sort(folders.begin(), folders.end());
  std::vector<std::string> rows;
  for (const Expected& row : kCheckpoints) rows.emplace_back(row.name);
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(folders, rows);
}

}  // namespace
}  // namespace conclave
