// The values of a GGUF header's keys.
#pragma once

#include "io/gguf/cursor.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace conclave::inline v0::io {

// Numbers of an array are kept as float64 if there are at most 65536; of strings, as of the words
// of a tokenizer, only the count is.
struct GgufArray {
  bool of_numbers = false;
  uint64_t count = 0;
  std::vector<double> numbers = {};
};
using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string, GgufArray>;

// Reads a type and a value of it. Throws Error(kGgufValueType, kGgufBool, kGgufString, kGgufArray,
// kGgufTruncatedHeader) naming the key.
GgufValue read_gguf_value(GgufCursor& cursor, std::string_view key);

}  // namespace conclave::inline v0::io
