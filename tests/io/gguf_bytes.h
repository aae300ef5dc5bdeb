// Hand-made GGUF files, well-formed or not, put together field by field.
#pragma once

#include "io/gguf/header.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace conclave::testing {

// The format's ids of value types.
enum GgufValueId : uint32_t {
  kGgufU8 = 0,
  kGgufI8 = 1,
  kGgufU16 = 2,
  kGgufI16 = 3,
  kGgufU32 = 4,
  kGgufI32 = 5,
  kGgufF32 = 6,
  kGgufBoolean = 7,
  kGgufText = 8,
  kGgufList = 9,
  kGgufU64 = 10,
  kGgufI64 = 11,
  kGgufF64 = 12,
};

// The format's ids of some tensor types.
inline constexpr uint32_t kTypeF32 = 0;
inline constexpr uint32_t kTypeF16 = 1;
inline constexpr uint32_t kTypeQ8_0 = 8;
inline constexpr uint32_t kTypeQ2K = 10;
inline constexpr uint32_t kTypeQ4K = 12;
inline constexpr uint32_t kTypeI8 = 24;
inline constexpr uint32_t kTypeF64 = 28;

template <class T>
std::string little_endian(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

// A length of 64 bits, then the text.
std::string gguf_text(std::string_view text);
// A key, the type of its value, and the value's bytes.
std::string gguf_entry(std::string_view key, uint32_t type, std::string_view value);
template <class T>
  requires std::is_arithmetic_v<T>
std::string gguf_entry(std::string_view key, uint32_t type, T value) {
  return gguf_entry(key, type, std::string_view(little_endian(value)));
}
// The value of an array: the type and number of its elements, and their bytes.
std::string gguf_array(uint32_t type, uint64_t count, std::string_view elements = {});
// A tensor's place. `dims` as they stand in the file, the length of a row first.
std::string gguf_tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t offset);

struct GgufParts {
  uint32_t version = 3;
  std::vector<std::string> entries = {};
  std::vector<std::string> tensors = {};
  size_t data_bytes = 0;
  size_t alignment = 32;                     // does not write the key
  std::optional<uint64_t> num_entries = {};  // as many as there are
  std::optional<uint64_t> num_tensors = {};  // as many as there are
};

std::string gguf_header(const GgufParts& parts);
// Header, zeros up to the alignment, and data whose bytes differ from their neighbours.
std::string gguf(const GgufParts& parts);

// `count` tensors of one F32, named as in a large model; with `keys` as many keys, too.
GgufParts large_gguf(size_t count, size_t keys = 0);

// A reader of bytes in memory; what lies behind them, up to the size a file claims, is zeros.
io::ReadBytes reader_of(std::string_view file);
io::GgufHeader parse_gguf(std::string_view file);

}  // namespace conclave::testing
