// Compares every checkpoint of testdata/quantised, with e4m3 experts as each method stores them,
// with outputs that tools/make_quantised.py computed in float64 from the same files.

#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace conclave {
namespace {

const std::filesystem::path kQuantised = "testdata/quantised";

struct Expected {
  const char* name;
  QuantSpec quant;
  std::string layout;
  std::optional<DType> shared = {};
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
    {"mixtral-modelopt-block", {.weights = kBlock}, "per_expert"},
    {"mixtral-modelopt-channel", {.weights = kChannel, .activations = kToken}, "per_expert"},
    {"mixtral-modelopt-fp8", {.weights = kTensor, .activations = kTensorStatic}, "per_expert"},
    {"qwen2_moe-fp8-block-shared-bf16",
     {.weights = kBlock, .activations = kGroup},
     "per_expert",
     DType::kBF16},
    {"qwen3_moe-compressed-block", {.weights = kBlock, .activations = kGroup}, "per_expert"},
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
  EXPECT_EQ(spec.weight_dtype, DType::kF8E4M3);
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
    EXPECT_LE(worst(token_errors(out.view(), expected_)), accuracy_bar(DType::kF8E4M3, dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Quantised, ::testing::ValuesIn(kCheckpoints),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

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
