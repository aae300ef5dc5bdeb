// All tensors of a checkpoint, sorted by the decoder layer that their names put them in.
#pragma once

#include "checkpoint/model_config.h"
#include "checkpoint/tensor_name.h"
#include "checkpoint/tensor_table.h"

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct LayerTensor {
  int32_t tensor = 0;     // index into TensorTable::tensors
  std::string_view rest;  // its name after "layers.N."; for codes that of their matrix
  bool canonical = true;  // false if N is written with leading zeros
};

struct LayerTensors {
  std::string trunk;                             // "model.", "language_model.model.", or empty
  std::vector<std::vector<LayerTensor>> layers;  // by layer number, num_hidden_layers or more
  // The start of the names of each extra layer that holds experts or a router: "mtp.layers.0.".
  std::map<int64_t, std::string> extra;
  std::vector<std::string> notes;        // parts that are not read, names of no known part
  std::deque<std::string> renamed = {};  // names of matrices whose codes have others

  std::vector<int64_t> extra_layers() const;  // ascending
  // The start of a layer's names: "model.layers.0.".
  std::string layer_start(const Architecture& architecture, int64_t layer) const;
};

// Layers beyond num_hidden_layers and those of a head for multi-token prediction.
enum class ExtraLayers : uint8_t { kSkip, kRead };

// The trunk is inferred from the names of expert tensors. Throws Error(kTensorUnexpected) if
// experts lie under two trunks.
LayerTensors group_by_layer(const ModelConfig& config, const TensorTable& table,
                            ExtraLayers extra = ExtraLayers::kSkip);

// The parts of the name; nothing for names without a layer and for parts of the model that are not
// read (multi-token prediction, parts with experts of their own).
std::optional<LayerName> split_model_name(const Architecture& architecture, std::string_view name);

// Settles what the family leaves to the file: whether a layer has a selection bias.
void settle_by_file(const LayerTensors& tensors, const TensorTable& table, ModelConfig& config);

// Marks the routed experts of a layer, and with them its shared experts, as quantised.
void quantise(const QuantizedWeights& quant, MoeSpec& spec);

// Decides the form of a layer of a model whose modules have schemes of their own; false if rows
// stay as they are, where a file asks for codes. Throws NotRead, and as map_layers.
bool settle_modules(const ModelConfig& config, const TensorTable& table,
                    const LayerTensors& tensors, LayerConfig& layer);

// The layer as its tensors say, where modules have schemes of their own; all others as they are.
// Throws Error(kUnsupportedQuantization), and as map_layers.
LayerConfig settled_layer(const ModelConfig& config, const TensorTable& table,
                          const LayerTensors& tensors, const LayerConfig& layer);

// Decides by the types of their matrices which layers of a quantised model are quantised. Modules
// that the quantiser left out are plain; if experts have codes that are not read, the method of the
// whole model counts as one that is not read.
void settle_quantization(const LayerTensors& tensors, const TensorTable& table,
                         ModelConfig& config);

}  // namespace conclave::inline v0::checkpoint
