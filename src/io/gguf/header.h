// The header of a GGUF file: keys with values, then the places of the tensors. Everything is
// checked before it is used, in memory bounded by the file and O(n log n) time.
#pragma once

#include "io/gguf/cursor.h"
#include "io/gguf/types.h"
#include "io/gguf/value.h"
#include "io/name_index.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::io {

struct GgufEntry {
  std::string key;
  GgufValue value;
  // The type and the value as the file has them.
  uint64_t value_offset = 0;
  uint64_t value_bytes = 0;
};

struct GgufTensor {
  static constexpr size_t kMaxRank = 4;

  std::string name;
  const GgufType* type = nullptr;
  uint32_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};  // row-major: the last of `rank` is the length of a row
  uint64_t file_offset = 0;
  uint64_t bytes = 0;

  std::span<const int64_t> shape() const noexcept { return {dims.data(), rank}; }
};

struct GgufHeader {
  uint32_t version = 0;
  uint64_t alignment = 0;
  std::vector<GgufEntry> entries;   // in file order
  std::vector<GgufTensor> tensors;  // in file order
  NameIndex entry_names;            // map to entries and tensors, group 0
  NameIndex tensor_names;

  const GgufValue* find_value(std::string_view key) const noexcept;     // null if absent
  const GgufTensor* find_tensor(std::string_view name) const noexcept;  // null if absent
};

// Throws Error(35x to 37x), one code for each rule, and what `read` throws.
GgufHeader parse_gguf_header(ReadBytes read, uint64_t file_bytes, std::string_view file);

// The header at the start of some bytes, which may end before the data of its tensors, anywhere in
// it, or behind. Errors name `origin` as the file.
GgufHeader parse_gguf_header(std::span<const std::byte> bytes, std::string_view origin);

// Returns "Q4_K [128, 2048, 768]".
std::string describe_tensor(const GgufTensor& tensor);

}  // namespace conclave::inline v0::io
