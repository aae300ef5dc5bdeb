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
  MoeSpec spec = {};  // the tensors decide the types of matrices
  Support support = Support::yes();
  // Where modules have schemes of their own: that of the layer's experts, one of the model's.
  const std::optional<QuantizedWeights>* quant = nullptr;
  bool is_mixed = false;  // experts have several, and `spec` a form that holds them all
  bool is_part = false;   // only those matrices are expected of which some tensor is there
};

struct ModelConfig {
  const Architecture* architecture = nullptr;
  std::string model_type;
  int64_t num_hidden_layers = 0;
  std::optional<DType> dtype;             // the model's arithmetic type, if the config gives one
  std::string quantization;               // name of a method that is not read; empty: none
  std::optional<QuantizedWeights> quant;  // if their method is read
  std::string quant_method;               // the name of that method
  std::vector<LayerConfig> layers;        // MoE layers, ascending
  Support support = Support::yes();       // for all layers, beside that of each
  std::vector<std::string> notes;
};

// Throws Error(kConfigMissingKey, kConfigValue, kJsonType, kUnknownArchitecture) naming file, key,
// value and limit.
ModelConfig read_model_config(const io::JsonValue& root, ExpertSet experts = ExpertSet::kText);

// Adds MoE layers beyond num_hidden_layers to the model read from `root`, even if its rule for
// dense layers excludes them. Throws as read_model_config.
void add_extra_layers(const io::JsonValue& root, std::span<const int64_t> layers,
                      ModelConfig& model);

// Throws Error(kUnknownArchitecture) with the known types and the nearest one.
[[noreturn]] void reject_model_type(std::string_view model_type);

// Completes the router's rounding types that depend on the type its matrix is stored in.
void set_stored_rounding(const ModelConfig& config, DType stored, RouterSpec& router);

// Takes over what a file says about the weights' quantisation.
void set_quantization(const Quantization& found, ModelConfig& model);
// Returns "quantised with gptq: ..." for Support and for Error(kUnsupportedQuantization).
std::string quantization_reason(std::string_view method);

}  // namespace conclave::inline v0::checkpoint
