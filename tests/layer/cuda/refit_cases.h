// Layers on a GPU whose weights change, and what they compute before and after.
#pragma once

#include "device_layer.h"
#include "layer/refit_sources.h"

#include "conclave/refit.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace conclave::testing {

struct RefitCase {
  std::string name;
  MoeSpec spec;
};

inline MoeSpec coded_layer(DType dtype, const QuantSpec& quant, int64_t hidden, int64_t inner) {
  MoeSpec spec = make_spec(6, 2, hidden, inner, dtype);
  spec.quant = quant;
  return spec;
}

// Every kind of memory that a layer on a GPU has. Rows of 288 codes of 4 bits end within a block of
// lanes.
inline std::vector<RefitCase> refit_cases() {
  std::vector<RefitCase> cases;
  MoeSpec everything = make_spec(6, 2, 136, 72, DType::kBF16);
  everything.has_bias = true;
  everything.has_output_bias = true;
  everything.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 48, .has_bias = true};
  everything.router = {
      .has_logit_bias = true, .has_selection_bias = true, .has_expert_scale = true};
  everything.residual = {.intermediate_size = 40};
  cases.push_back({"everything", everything});
  MoeSpec fused = make_spec(6, 2, 128, 64, DType::kF16);
  fused.shared = {.mode = SharedMode::kAdd, .intermediate_size = 128};
  cases.push_back({"shared experts as slots", fused});
  cases.push_back({"e4m3 in blocks", coded_layer(DType::kF8E4M3,
                                                 {.weights = WeightScale::kBlock,
                                                  .activations = ActivationScale::kGroup},
                                                 256, 256)});
  cases.push_back({"e4m3 with steps", coded_layer(DType::kF8E4M3,
                                                  {.weights = WeightScale::kTensor,
                                                   .activations = ActivationScale::kTensorStatic},
                                                  256, 128)});
  cases.push_back(
      {"int4 in groups",
       coded_layer(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32},
                   288, 96)});
  cases.push_back(
      {"codes with scales of powers", coded_layer(DType::kF4,
                                                  {.weights = WeightScale::kBlock,
                                                   .block_rows = 1,
                                                   .block_cols = 32,
                                                   .scale_values = ScaleValues::kPowerOfTwo},
                                                  288, 96)});
  cases.push_back({"codes with scales of e4m3", coded_layer(DType::kF4,
                                                            {.weights = WeightScale::kBlock,
                                                             .block_rows = 1,
                                                             .block_cols = 16,
                                                             .scale_values = ScaleValues::kFloat8,
                                                             .has_global_scale = true},
                                                            288, 96)});
  cases.push_back(
      {"codes with scales and offsets in steps", coded_layer(DType::kU4,
                                                             {.weights = WeightScale::kBlock,
                                                              .block_rows = 1,
                                                              .block_cols = 32,
                                                              .scale_values = ScaleValues::kSteps,
                                                              .zeros = WeightZero::kOffset,
                                                              .zero_values = ScaleValues::kSteps},
                                                             288, 96)});
  // Slices of two ranks begin with a unit.
  cases.push_back({"codes with scales in steps", coded_layer(DType::kI8,
                                                             {.weights = WeightScale::kBlock,
                                                              .block_rows = 1,
                                                              .block_cols = 16,
                                                              .scale_values = ScaleValues::kSteps},
                                                             144, 512)});
  cases.push_back({"codes times steps", coded_layer(DType::kI4,
                                                    {.weights = WeightScale::kBlock,
                                                     .block_rows = 1,
                                                     .block_cols = 16,
                                                     .scale_values = ScaleValues::kSteps,
                                                     .zeros = WeightZero::kOffset,
                                                     .zero_values = ScaleValues::kSteps},
                                                    144, 512)});
  return cases;
}

inline constexpr std::array kRefitModes = {RefitMode::kStaged, RefitMode::kStagedCopy,
                                           RefitMode::kInPlace};

// A spec with two sets of weights.
struct TwoWeights {
  explicit TwoWeights(const MoeSpec& of)
      : spec(of),
        first(make_synthetic_source(of, 3)),
        second(make_synthetic_source(of, 4)),
        rows(of.weight_dtype == DType::kF16 ? DType::kF16 : DType::kBF16) {
    for (const int64_t tokens : {3, 40}) {
      hidden.push_back(random_tensor(rows, tokens, of.hidden_size, 5));
    }
  }
  std::unique_ptr<WeightSource> merged(const RefitScope& scope) const {
    return std::make_unique<MergedSource>(spec, *first, *second, scope);
  }
  std::unique_ptr<WeightSource> of_first() const { return make_synthetic_source(spec, 3); }
  std::unique_ptr<WeightSource> of_second() const { return make_synthetic_source(spec, 4); }
  // Few rows and many take other kernels.
  std::vector<Tensor> run(DeviceLayer& owned) const {
    std::vector<Tensor> outputs;
    for (const Tensor& each : hidden) {
      DeviceForward forward(owned, each.view(), rows);
      forward.enqueue();
      outputs.push_back(forward.out());
    }
    return outputs;
  }

  MoeSpec spec;
  std::unique_ptr<WeightSource> first;
  std::unique_ptr<WeightSource> second;
  DType rows;
  std::vector<Tensor> hidden;
};

inline bool same_outputs(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

}  // namespace conclave::testing
