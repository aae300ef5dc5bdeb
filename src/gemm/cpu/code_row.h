// One row of activations on its way to int8 codes.
#pragma once

#include "gemm/row_scales.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

inline constexpr float kLeastRowCode = -128.0F;
inline constexpr float kLargestRowCode = 127.0F;

// The rule is that of quant/activation_rows.h, and the codes and scales are the same to the bit.
struct CodeRowTask {
  const float* values = nullptr;  // [columns]; the codes may lie in their place
  int64_t columns = 0;
  const float* static_scale = nullptr;  // null: scales are made of the values
  bool power_of_two_scales = false;

  std::byte* codes = nullptr;  // [columns], then zeros up to a multiple of 64
  float* scales = nullptr;     // one for each `rows.width` columns
  int32_t* sums = nullptr;     // one for each segment
  WeightGroups groups = {};    // the matrix has them that the row is multiplied with
  RowScales rows = {};
};

using CodeRowFunction = void (*)(const CodeRowTask& task) noexcept;

}  // namespace conclave::inline v0::gemm
