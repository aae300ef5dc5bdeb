// The inverse of BlockType::take_apart: values become blocks of a GGUF type.
#pragma once

#include "quant/gguf/block_type.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0::quant {

struct BlockEncoder {
  std::string_view type;  // "Q4_0"
  // Makes one block of finite values. `share` says which part of their range the codes span: 1, or
  // another for a search. With 1, blocks have the bytes that gguf-py gives them, where it makes
  // blocks of the type.
  void (*encode)(const float* values, float share, std::byte* block) = nullptr;
  // Makes the block of least squared error that it finds; null if shares are to be tried.
  void (*search)(const float* values, std::byte* block) = nullptr;
  // Codes that do not count evenly stand for these, ascending.
  std::span<const int8_t> grid = {};
};

// All encoders, in the order that names are listed.
std::span<const BlockEncoder> block_encoders() noexcept;
// The encoder of this type; null if there is none.
const BlockEncoder* find_block_encoder(std::string_view type) noexcept;

}  // namespace conclave::inline v0::quant
