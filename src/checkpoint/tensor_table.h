// Names, types and shapes of tensors, wherever their data is.
#pragma once

#include "conclave/safetensors.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A tensor and the file that holds it.
struct StoredTensor {
  const TensorInfo* info = nullptr;
  int32_t shard = 0;
};

// A tensor without elements counts as absent, unless a matrix of some size is required.
inline bool is_empty(const TensorInfo& tensor) {
  return std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
}

struct TensorTable {
  std::vector<std::string> names;     // file names, within the directory
  std::vector<std::string> paths;     // paths of the same files, for messages
  std::vector<StoredTensor> tensors;  // names are unique
  std::string listing;                // the file that lists the tensors, for messages

  const TensorInfo& info(int32_t tensor) const {
    return *tensors[static_cast<size_t>(tensor)].info;
  }
  const std::string& path_of(int32_t tensor) const {
    return paths[static_cast<size_t>(tensors[static_cast<size_t>(tensor)].shard)];
  }
  const std::string& name_of(int32_t tensor) const {
    return names[static_cast<size_t>(tensors[static_cast<size_t>(tensor)].shard)];
  }
};

}  // namespace conclave::inline v0::checkpoint
