// Blocks of every GGUF type beside the values that gguf-py gives them.
#pragma once

#include "conclave/safetensors.h"

#include <string>
#include <vector>

namespace conclave::testing {

// A type's blocks lie under its name, their values under "<name>.values".
inline const SafetensorsFile& gguf_blocks() {
  static const SafetensorsFile kFile = SafetensorsFile::open("testdata/gguf/blocks.safetensors");
  return kFile;
}

inline std::vector<std::string> gguf_block_types() {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : gguf_blocks().tensors()) {
    if (!tensor.name.ends_with(".values")) names.push_back(tensor.name);
  }
  return names;
}

}  // namespace conclave::testing
