// Chooses the scales and codes of blocks of 256 values whose groups share a scale, and perhaps an
// offset, that is itself a small integer times a float16 of the block:
// value = scale * s_g * code - offset * o_g.
#pragma once

#include "quant/gguf/block_type.h"

#include <array>
#include <cstdint>

namespace conclave::inline v0::quant {

// The ranges that a type gives to its integers.
struct TwoLevelForm {
  int64_t group = 32;     // values that share a scale
  int least_code = 0;     // 0 for types with offsets, else as far below 0 as codes go
  int largest_code = 15;  // the least of symmetric types is one further from 0
  int least_scale = 0;    // the range that s_g has
  int largest_scale = 63;
  int largest_offset = 63;  // o_g goes up to it; 0 for types without

  int64_t groups() const { return kMaxBlockElements / group; }
  bool has_offsets() const { return largest_offset > 0; }
};

struct TwoLevelBlock {
  float scale = 0;   // float16 numbers
  float offset = 0;  // not below 0
  std::array<int, kMaxBlockGroups> scales = {};
  std::array<int, kMaxBlockGroups> offsets = {};
  std::array<int, kMaxBlockElements> codes = {};
};

// The codes of each group span `share` of its range, from 0 at the least where there are offsets.
TwoLevelBlock spread_two_levels(const TwoLevelForm& form, const float* values, float share);
// Looks for the least squared error: ranges and lines through the values for each group, then, in
// turn, the integers of each group for the numbers of the block and these numbers by least squares.
TwoLevelBlock fit_two_levels(const TwoLevelForm& form, const float* values);

}  // namespace conclave::inline v0::quant
