// Rows become codes by these steps on 16 lanes. Included by wholes_avx512-inl.h only.
#pragma once

#include "gemm/cpu/code_row.h"
#include "gemm/cpu/simd_avx512-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

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
    quotient = _mm512_max_ps(quotient, _mm512_set1_ps(kLeastRowCode));
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

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
