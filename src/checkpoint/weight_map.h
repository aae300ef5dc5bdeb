// The weight map of model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include "io/json.h"

#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Valid as long as its document.
struct WeightMap {
  std::string file;                 // for messages
  io::JsonValue tensors;            // {"TENSOR": "SHARD", ...}
  std::vector<std::string> shards;  // names of the shards, each once, sorted
};

// Every shard name is one plain path component. Throws Error(kIndexNoWeightMap, kPathEscape and
// other codes of a bad name, kJsonType).
WeightMap read_weight_map(const io::JsonDocument& document);

}  // namespace conclave::inline v0::checkpoint
