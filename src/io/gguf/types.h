// The types of tensors in GGUF files: blocks of so many elements in so many bytes.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::io {

struct GgufType {
  uint32_t id = 0;
  std::string_view name;        // "Q4_K"
  uint32_t block_elements = 1;  // along the row, which holds whole blocks
  uint32_t block_bytes = 0;
};

// The type of this id or name, or null.
const GgufType* find_gguf_type(uint32_t id) noexcept;
const GgufType* find_gguf_type(std::string_view name) noexcept;

// The name of a type that older writers used and that readers no longer know; else empty.
std::string_view removed_gguf_type(uint32_t id) noexcept;

}  // namespace conclave::inline v0::io
