// The tensor files of a model directory: model.safetensors, or the shards that
// model.safetensors.index.json lists. Index and shards must agree exactly.
#pragma once

#include "io/directory.h"

#include "conclave/safetensors.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A tensor and the shard that holds it.
struct StoredTensor {
  const TensorInfo* info = nullptr;
  int32_t shard = 0;
};

struct ShardSet {
  std::vector<SafetensorsFile> files;
  std::vector<std::string> names;     // of the files, in the directory
  std::vector<StoredTensor> tensors;  // of all shards, shard by shard; names are unique
  std::string listing;                // the file that says which tensors there are: for messages
  std::vector<std::string> notes;
};

// Reads every header and no data. Throws Error 2xx for files, 3xx for headers, kIndexNoWeightMap,
// kIndexShardMissing, kIndexTensorMissing, kIndexTensorUnlisted, kPathEscape, kForbiddenFormat.
ShardSet open_shards(const io::Directory& directory, FileAccess access);

}  // namespace conclave::inline v0::checkpoint
