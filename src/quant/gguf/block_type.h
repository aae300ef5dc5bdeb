// Blocks of GGUF tensors. A block of any type comes apart into small integers, and for each group
// of them a scale and an offset: value = scale * code - offset. The products are exact in float32,
// so that values have the bits that ggml gives them.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace conclave::inline v0::quant {

inline constexpr int64_t kMaxBlockElements = 256;
inline constexpr int64_t kMaxBlockGroups = 16;

// A block's content. Of the arrays, as much is used as the type has elements and groups.
struct BlockParts {
  int8_t codes[kMaxBlockElements];
  float scales[kMaxBlockGroups];
  float offsets[kMaxBlockGroups];  // for types with has_offset
};

struct BlockType {
  std::string_view name;  // "Q4_K", as GGUF files call it
  int64_t elements = 0;   // along a row
  int64_t bytes = 0;
  int64_t group = 0;  // elements that share a scale
  int8_t least = 0;   // range of the codes
  int8_t largest = 0;
  bool has_offset = false;
  // Needs no alignment. Every block of `bytes` bytes is valid: scales may be infinite or NaN.
  void (*take_apart)(const std::byte* block, BlockParts& parts) = nullptr;
  ScaleValues scale_values = ScaleValues::kFloat;  // and those of offsets
  // A format of fewer bits whose codes stand for these, each less by the same factor.
  std::optional<DType> element = {};

  int64_t groups() const { return elements / group; }
};

std::span<const BlockType> block_types() noexcept;
// The type of this name; null if it has no blocks, as "F32".
const BlockType* find_block_type(std::string_view name) noexcept;

// Decodes elements [begin, begin + count) of a row of blocks.
void decode_blocks(const BlockType& type, const std::byte* row, int64_t begin, int64_t count,
                   float* values);

}  // namespace conclave::inline v0::quant
