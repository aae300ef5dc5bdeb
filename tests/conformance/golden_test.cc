// Compares the bundled checkpoints, real files of transformers models, with recorded float64
// results.

#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::run_layer;

const std::vector<std::string> kModels = {"mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny",
                                          "olmoe-tiny"};

std::vector<double> as_doubles(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.shape().num_elements()));
  convert(tensor.view(), {.data = values.data(), .dtype = DType::kF64, .shape = tensor.shape()});
  return values;
}

class Golden : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Golden, EveryLayer_MatchesTheRecordedFloat64Results) {
  const auto& [model, isa] = GetParam();
  const std::filesystem::path directory = std::filesystem::path("testdata") / model;
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const SafetensorsFile reference = SafetensorsFile::open(directory / "reference.safetensors");
  const Context context({.num_threads = 2, .isa = isa});
  ASSERT_FALSE(checkpoint.layers().empty());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    SCOPED_TRACE("layer " + std::to_string(layer.index));
    ASSERT_TRUE(layer.support) << layer.support.reason();
    const auto source = checkpoint.layer_source(layer.index);
    const MoeLayer moe = MoeLayer::create(context, layer.spec, *source, {.max_tokens = 8});
    const std::string prefix = "layers." + std::to_string(layer.index) + ".";
    const Tensor hidden = reference.load(prefix + "hidden_states");
    const auto output = run_layer(moe, hidden.view(), hidden.dtype());

    const Tensor ids = reference.load(prefix + "topk_ids");
    EXPECT_TRUE(testing::same_bits(output.ids, ids));
    const Tensor weights = reference.load(prefix + "topk_weights");
    const Tensor logits = reference.load(prefix + "router_logits");
    // The recorded logits are rounded from float64, ours from a float32 sum of H terms: near a
    // midpoint they differ by one unit of the model's type, and in float32 by the sum's own error.
    const double sum_unit = static_cast<double>(layer.spec.hidden_size) * 0x1p-24;
    const DType logit_type = layer.spec.router.logits_dtype;
    const double logit_unit = logit_type == DType::kF32   ? sum_unit
                              : logit_type == DType::kF16 ? 0x1p-10
                                                          : 0x1p-7;
    for (int64_t i = 0; i < logits.shape().num_elements(); ++i) {
      const double expected = logits.as<float>()[i];
      EXPECT_NEAR(output.logits.as<float>()[i], expected,
                  logit_unit * std::max(std::abs(expected), 1.0));
    }
    for (int64_t i = 0; i < weights.shape().num_elements(); ++i) {
      EXPECT_NEAR(output.weights.as<float>()[i], weights.as<float>()[i],
                  16 * logit_unit * weights.as<float>()[i]);
    }
    const std::vector<double> expected = as_doubles(reference.load(prefix + "output"));
    EXPECT_LE(worst(token_errors(output.out.view(), expected)),
              accuracy_bar(layer.spec.weight_dtype, hidden.dtype()));

    // The library's own oracle agrees with the recorded one to float64 accuracy.
    const ReferenceResult own =
        reference_forward(context, layer.spec, *source, {.hidden = hidden.view()});
    double worst_difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      worst_difference = std::max(worst_difference, std::abs(own.output[i] - expected[i]));
    }
    EXPECT_LE(worst_difference, 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Golden,
                         ::testing::Combine(::testing::ValuesIn(kModels),
                                            ::testing::ValuesIn(testing::usable_isas())),
                         [](const auto& row) {
                           std::string name = std::get<0>(row.param) + "_" + std::get<1>(row.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace conclave
