// Rows of float32 become int8 codes with scales, by the rule of quant/activation_rows.h, and the
// sum of the codes of each segment, which products with unsigned weights need.
#pragma once

#include "gemm/cpu/code_row.h"
#include "gemm/cpu/simd-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr float kLargestRowCode = 127.0F;
inline constexpr uint32_t kInfinityBits = 0x7f800000U;

// The largest magnitude as bits: above those of infinity if a value is NaN.
CONCLAVE_KERNEL_INLINE uint32_t largest_bits(const float* values, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t rest = count - i;
    const __mmask16 there = Vec::first(rest < 16 ? rest : 16);
    const __m512i bits = _mm512_maskz_loadu_epi32(there, values + i);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, magnitude));
  }
  return _mm512_reduce_max_epu32(largest);
}

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

// The codes of a group may lie where its values are: they take fewer bytes, and so do all before.
CONCLAVE_KERNEL_INLINE void code_group(const float* values, int64_t count, float scale,
                                       std::byte* codes) {
  const __m512 step = _mm512_set1_ps(scale);
  const __mmask16 finite = scale == scale ? 0xffff : 0;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t rest = count - i;
    const __mmask16 there = Vec::first(rest < 16 ? rest : 16);
    __m512 quotient = _mm512_div_ps(_mm512_maskz_loadu_ps(there, values + i), step);
    quotient = _mm512_min_ps(quotient, _mm512_set1_ps(kLargestRowCode));
    quotient = _mm512_max_ps(quotient, _mm512_set1_ps(-128.0F));
    const __m512i code = _mm512_maskz_cvtps_epi32(finite, quotient);
    _mm_mask_storeu_epi8(codes + i, there, _mm512_cvtepi32_epi8(code));
  }
}

CONCLAVE_KERNEL_INLINE int32_t sum_codes(const std::byte* codes, int64_t count) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t rest = count - i;
    const __mmask64 there = rest < 64 ? (1ULL << rest) - 1 : ~0ULL;
    sums = _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi8(there, codes + i));
  }
  return _mm512_reduce_add_epi32(sums);
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
