// Compares every checkpoint of testdata/quantised, with experts in codes as each method stores
// them, with outputs that tools/make_quantised.py computed in float64 from the same files, and
// integer codes with the weights that compressed-tensors decompressed.

#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
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
};
void PrintTo(const Expected& expected, std::ostream* out) { *out << expected.name; }

constexpr auto kTensor = WeightScale::kTensor;
constexpr auto kChannel = WeightScale::kChannel;
constexpr auto kBlock = WeightScale::kBlock;
using enum ActivationScale;

const std::vector<Expected> kCheckpoints = {
    {"deepseek_v3-fp8-block",
     {.weights = kBlock, .activations = kGroup, .power_of_two_scales = true},
     "per_expert"},
    {"mixtral-compressed-channel", {.weights = kChannel, .activations = kToken}, "per_expert"},
    {"mixtral-compressed-int8-token",
     {.weights = kChannel, .activations = kToken},
     "per_expert",
     {},
     DType::kI8},
    {"mixtral-modelopt-block", {.weights = kBlock}, "per_expert"},
    {"mixtral-modelopt-channel", {.weights = kChannel, .activations = kToken}, "per_expert"},
    {"mixtral-modelopt-fp8", {.weights = kTensor, .activations = kTensorStatic}, "per_expert"},
    {"qwen2_moe-compressed-int4-shared-bf16",
     {.weights = kBlock, .block_rows = 1, .block_cols = 32},
     "per_expert",
     DType::kBF16,
     DType::kI4},
    {"qwen2_moe-fp8-block-shared-bf16",
     {.weights = kBlock, .activations = kGroup},
     "per_expert",
     DType::kBF16},
    {"qwen3_moe-compressed-block", {.weights = kBlock, .activations = kGroup}, "per_expert"},
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
    {"qwen3_moe-compressed-int8-channel", {.weights = kChannel}, "per_expert", {}, DType::kI8},
    {"qwen3_moe-compressed-tensor-static",
     {.weights = kTensor, .activations = kTensorStatic},
     "per_expert"},
    {"qwen3_moe-compressed-weight-only", {.weights = kChannel}, "per_expert"},
    {"qwen3_moe-fp8-stacked", {.weights = kBlock, .activations = kGroup}, "stacked"},
    {"qwen3_moe-fp8-static-stacked", {.weights = kTensor, .activations = kTensorStatic}, "stacked"},
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

TEST_P(Quantised, Spec_IsAsTheConfigurationSays) {
  const MoeSpec& spec = layer().spec;
  const QuantSpec& wanted = GetParam().quant;
  EXPECT_TRUE(layer().support) << layer().support.reason();
  EXPECT_EQ(layer().layout, GetParam().layout);
  EXPECT_EQ(spec.weight_dtype, GetParam().type);
  EXPECT_EQ(spec.quant.weights, wanted.weights);
  EXPECT_EQ(spec.quant.activations, wanted.activations);
  EXPECT_EQ(spec.quant.block_rows, wanted.block_rows);
  EXPECT_EQ(spec.quant.block_cols, wanted.block_cols);
  EXPECT_EQ(spec.quant.power_of_two_scales, wanted.power_of_two_scales);
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
  EXPECT_LE(worst(token_errors(output.view(), expected_)), 1e-12);
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

std::vector<std::byte> read_all(const WeightSource& source, WeightId role, int64_t expert) {
  const WeightInfo info = source.describe(role);
  const int64_t bits = info.rows * info.cols * bit_size(info.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(bits / 8));
  source.read(role, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

float integer_at(const std::vector<std::byte>& codes, int64_t index, DType type) {
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
    exact.as<float>()[i] = integer_at(codes, i, info.dtype) * scales.as<float>()[i / group];
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

std::vector<Expected> integer_checkpoints() {
  std::vector<Expected> rows = kCheckpoints;
  std::erase_if(rows, [](const Expected& row) { return row.type == DType::kF8E4M3; });
  return rows;
}

std::string test_name(const ::testing::TestParamInfo<Expected>& test) {
  std::string name = test.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Quantised, ::testing::ValuesIn(kCheckpoints), test_name);
INSTANTIATE_TEST_SUITE_P(Checkpoints, IntegerCodes, ::testing::ValuesIn(integer_checkpoints()),
                         test_name);

TEST(QuantisedFolders, EachHasItsRow) {
  std::vector<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(kQuantised)) {
    if (entry.is_directory()) folders.push_back(entry.path().filename().string());
  }
  std::sort(folders.begin(), folders.end());
  std::vector<std::string> rows;
  for (const Expected& row : kCheckpoints) rows.emplace_back(row.name);
  EXPECT_EQ(folders, rows);
}

}  // namespace
}  // namespace conclave
