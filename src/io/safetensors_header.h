// The safetensors header: 8 bytes of length, then a JSON object that places every tensor in the
// data behind it. Everything is checked before it is used, in linear memory and O(n log n) time.
#pragma once

#include "io/name_index.h"

#include "conclave/safetensors.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::io {

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in file order
  std::map<std::string, std::string> metadata;
  NameIndex names;  // map to tensors, group 0
};

// Parses the JSON text and checks it against the file's size. Throws Error 3xx.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           std::string_view file);

}  // namespace conclave::inline v0::io
