// All tensors of a checkpoint, sorted by the decoder layer their name puts them in.
#pragma once

#include "checkpoint/model_config.h"
#include "checkpoint/tensor_name.h"
#include "checkpoint/tensor_table.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct LayerTensor {
  int32_t tensor = 0;     // index into TensorTable::tensors
  std::string_view rest;  // its name after "layers.N."
  bool canonical = true;  // false where N is written with leading zeros
};

struct LayerTensors {
  std::string trunk;                             // "model.", "language_model.model.", or empty
  std::vector<std::vector<LayerTensor>> layers;  // by layer number, num_hidden_layers or more
  // Extra layers that hold experts or a router, and how their names start: "mtp.layers.0.".
  std::map<int64_t, std::string> extra;
  std::vector<std::string> notes;  // parts that are not read, names of no known part

  std::vector<int64_t> extra_layers() const;  // ascending
  // How the names of a layer start: "model.layers.0.".
  std::string layer_start(const Architecture& architecture, int64_t layer) const;
};

// Layers beyond num_hidden_layers and those of a head for multi-token prediction.
enum class ExtraLayers : uint8_t { kSkip, kRead };

// The trunk is inferred from the names of expert tensors. Throws Error(kTensorUnexpected) if
// experts lie under two trunks.
LayerTensors group_by_layer(const ModelConfig& config, const TensorTable& table,
                            ExtraLayers extra = ExtraLayers::kSkip);

// The name taken apart; nothing for names without a layer and for parts of the model that are not
// read (multi-token prediction, parts with experts of their own).
std::optional<LayerName> split_model_name(const Architecture& architecture, std::string_view name);

// Settles what the family leaves to the file: whether a layer has a selection bias.
void settle_by_file(const LayerTensors& tensors, const TensorTable& table, ModelConfig& config);

// f32, f16 or bf16.
bool is_plain(DType dtype);
// The spec of a layer whose experts, and with them its shared ones, are quantised.
void quantise(const QuantSpec& quant, MoeSpec& spec);

// Of a quantised model: which layers are, by the types of their matrices. Modules that the
// quantiser left out are plain; experts in codes that are not read make the whole model one of a
// method that is not.
void settle_quantization(const LayerTensors& tensors, const TensorTable& table,
                         ModelConfig& config);

}  // namespace conclave::inline v0::checkpoint
