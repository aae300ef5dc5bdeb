// config.json read through an architecture table: sizes, layer numbers, router, activation, dtype.
#pragma once

#include "checkpoint/architecture.h"
#include "checkpoint/layer_rule.h"
#include "checkpoint/quantization.h"
#include "checkpoint/spec_reader.h"
#include "io/json.h"

#include "conclave/checkpoint.h"
#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct LayerConfig {
  int64_t index = 0;
  MoeSpec spec = {};  // types of matrices are left for the tensors to say
  Support support = Support::yes();
};

struct ModelConfig {
  const Architecture* architecture = nullptr;
  std::string model_type;
  int64_t num_hidden_layers = 0;
  std::optional<DType> dtype;        // the model's arithmetic type, where the config gives one
  std::string quantization;          // name of a method that is not read; empty: none
  std::optional<QuantSpec> quant;    // of e4m3 matrices, where their method is read
  std::string quant_method;          // its name
  std::vector<LayerConfig> layers;   // MoE layers, ascending
  Support support = Support::yes();  // of all layers, beside that of each
  std::vector<std::string> notes;
};

// Throws Error(kConfigMissingKey, kConfigValue, kJsonType, kUnknownArchitecture) naming file, key,
// value and limit.
ModelConfig read_model_config(const io::JsonValue& root, ExpertSet experts = ExpertSet::kText);

// Adds MoE layers beyond num_hidden_layers to the model read from `root`, whatever its rule for
// dense layers says of them. Throws as read_model_config.
void add_extra_layers(const io::JsonValue& root, std::span<const int64_t> layers,
                      ModelConfig& model);

// Throws Error(kUnknownArchitecture) with the types known and the nearest one.
[[noreturn]] void reject_model_type(std::string_view model_type);

// Completes the router's rounding types where the type that its matrix is stored in decides.
void set_stored_rounding(const ModelConfig& config, DType stored, RouterSpec& router);

// Takes over what a file says of the weights' quantisation.
void set_quantization(const Quantization& found, ModelConfig& model);
// "quantised with gptq: ..." for Support and for Error(kUnsupportedQuantization).
std::string quantization_reason(std::string_view method);

}  // namespace conclave::inline v0::checkpoint
