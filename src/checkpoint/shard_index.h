// The tensor files of a model directory: model.safetensors, or the shards that
// model.safetensors.index.json lists. Index and shards must agree exactly.
#pragma once

#include "checkpoint/tensor_table.h"
#include "io/directory.h"

#include "conclave/safetensors.h"

#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The tensors are in shard order.
struct ShardSet : TensorTable {
  std::vector<SafetensorsFile> files;
  std::vector<std::string> notes;
};

// Reads every header and no data. Throws Error 2xx for files, 3xx for headers, kIndexNoWeightMap,
// kIndexShardMissing, kIndexTensorMissing, kIndexTensorUnlisted, kPathEscape, kForbiddenFormat.
ShardSet open_shards(const io::Directory& directory, FileAccess access);

}  // namespace conclave::inline v0::checkpoint
