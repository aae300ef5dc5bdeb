// The records of the golden checkpoints in testdata/models: results of a family's published code,
// and float64 recomputations.
#pragma once

#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/layer.h"
#include "conclave/safetensors.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

namespace conclave::testing {

inline const std::filesystem::path kModels = "testdata/models";

// Returns one name that is no folder if testdata/models is missing, so that a case can report it.
inline std::vector<std::string> model_directories() {
  if (!std::filesystem::is_directory(kModels)) return {"missing"};
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kModels)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

inline std::vector<double> as_doubles(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.shape().num_elements()));
  convert(tensor.view(), {.data = values.data(), .dtype = DType::kF64, .shape = tensor.shape()});
  return values;
}

// The records of one layer in one run.
struct Record {
  Tensor hidden;          // [T, H]
  Tensor router_input;    // [T, H] or empty
  Tensor residual_input;  // [T, H] or empty
  Tensor token_ids;       // [T] or empty
  Tensor logits;          // [T, num_logits] f32
  Tensor ids;             // [T, slots] i32
  Tensor weights;         // [T, slots] f32, the published code's
  std::vector<double> exact_weights;
  std::vector<double> exact_output;

  bool has_logits() const { return logits.size_bytes() != 0; }

  ForwardArgs inputs() const {
    ForwardArgs args;
    if (router_input.size_bytes() != 0) args.router_input = router_input.view();
    if (residual_input.size_bytes() != 0) args.residual_input = residual_input.view();
    if (token_ids.size_bytes() != 0) args.token_ids = token_ids.view();
    return args;
  }
};

inline Record load_record(const SafetensorsFile& file, int64_t layer, const std::string& run) {
  const std::string prefix = "layers." + std::to_string(layer) + "." + run + ".";
  const auto optional = [&](const std::string& key) {
    return file.find(prefix + key) != nullptr ? file.load(prefix + key) : Tensor();
  };
  return {.hidden = file.load(prefix + "hidden_states"),
          .router_input = optional("router_input"),
          .residual_input = optional("residual_input"),
          .token_ids = optional("token_ids"),
          .logits = optional("router_logits"),
          .ids = file.load(prefix + "topk_ids"),
          .weights = file.load(prefix + "topk_weights"),
          .exact_weights = as_doubles(file.load(prefix + "float64.topk_weights")),
          .exact_output = as_doubles(file.load(prefix + "float64.output"))};
}

inline double worst_relative(const Tensor& actual, const std::vector<double>& expected) {
  double worst_error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto value = static_cast<double>(actual.as<float>()[i]);
    const double scale = std::max(std::abs(expected[i]), 1e-30);
    worst_error = std::max(worst_error, std::abs(value - expected[i]) / scale);
  }
  return worst_error;
}

// Counts the tokens whose ids differ from the record.
inline int64_t differing_tokens(const Tensor& actual, const Tensor& expected) {
  int64_t differing = 0;
  for (int64_t row = 0; row < expected.shape()[0]; ++row) {
    if (row_bytes(actual, row) != row_bytes(expected, row)) ++differing;
  }
  return differing;
}

}  // namespace conclave::testing
