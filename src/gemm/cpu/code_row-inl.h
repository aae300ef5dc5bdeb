// Rows of float32 become int8 codes with scales, by the rule of quant/activation_rows.h, and the
// sum of the codes of each segment, which products with unsigned weights need.
#pragma once

#include "gemm/cpu/code_row.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr uint32_t kInfinityBits = 0x7f800000U;

// The scale of a group; NaN if one of its values is not finite.
CONCLAVE_KERNEL_INLINE float row_group_scale(const CodeRowTask& task, const float* values,
                                             int64_t count) {
  const uint32_t largest = largest_bits(values, count);
  if (largest >= kInfinityBits) return __builtin_nanf("");
  if (task.static_scale != nullptr) return *task.static_scale;
  const float scale = __builtin_bit_cast(float, largest) / kLargestRowCode;
  if (scale == 0.0F) return 1.0F;
  if (!task.power_of_two_scales) return scale;
  const uint32_t exponent = (__builtin_bit_cast(uint32_t, scale) + 0x7fffffU) & kInfinityBits;
  return __builtin_bit_cast(float, exponent);
}

// A CodeRowFunction.
inline void code_row(const CodeRowTask& task) noexcept {
  const int64_t padded = (task.columns + 63) / 64 * 64;
  float* scales = task.scales;
  for (int64_t begin = 0; begin < task.columns; begin += task.rows.width) {
    const int64_t rest = task.columns - begin;
    const int64_t count = rest < task.rows.width ? rest : task.rows.width;
    const float scale = row_group_scale(task, task.values + begin, count);
    code_group(task.values + begin, count, scale, task.codes + begin);
    *scales++ = scale;
  }
  for (int64_t i = task.columns; i < padded; ++i) task.codes[i] = std::byte{0};
  int32_t* sums = task.sums;
  for (int64_t begin = 0; begin < task.columns;) {
    const int64_t end = segment_end(task.groups, task.rows, begin);
    *sums++ = sum_codes(task.codes + begin, end - begin);
    begin = end;
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
