// Rows become codes by these steps on 8 lanes. Included by wholes_avx2-inl.h only.
#pragma once

#include "gemm/cpu/code_row.h"
#include "gemm/cpu/simd_avx2-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

CONCLAVE_KERNEL_INLINE __m256 load_some(const float* values, int64_t count) {
  if (count >= 8) return _mm256_loadu_ps(values);
  return _mm256_maskload_ps(values, Vec::first(count));
}

// The largest magnitude as bits: above those of infinity if a value is NaN.
CONCLAVE_KERNEL_INLINE uint32_t largest_bits(const float* values, int64_t count) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 bits = _mm256_and_ps(load_some(values + i, count - i), magnitude);
    largest = _mm256_max_epi32(largest, _mm256_castps_si256(bits));
  }
  __m128i most =
      _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}

// The codes of a group may lie where its values are: they take fewer bytes, and so do all before.
CONCLAVE_KERNEL_INLINE void code_group(const float* values, int64_t count, float scale,
                                       std::byte* codes) {
  const __m256 step = _mm256_set1_ps(scale);
  const __m256i finite = _mm256_set1_epi32(scale == scale ? -1 : 0);
  for (int64_t i = 0; i < count; i += 8) {
    __m256 quotient = _mm256_div_ps(load_some(values + i, count - i), step);
    quotient = _mm256_min_ps(quotient, _mm256_set1_ps(kLargestRowCode));
    quotient = _mm256_max_ps(quotient, _mm256_set1_ps(kLeastRowCode));
    const __m256i code = _mm256_and_si256(_mm256_cvtps_epi32(quotient), finite);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    const int64_t eight = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
    const int64_t rest = count - i;
    if (rest >= 8) {
      __builtin_memcpy(codes + i, &eight, 8);
    } else {
      __builtin_memcpy(codes + i, &eight, static_cast<size_t>(rest));
    }
  }
}

CONCLAVE_KERNEL_INLINE int32_t sum_codes(const std::byte* codes, int64_t count) {
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    // A pair of codes fits 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16(ones, Vec::load_bits(codes + i));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  int32_t total = _mm_cvtsi128_si32(sum);
  for (; i < count; ++i) total += static_cast<int8_t>(codes[i]);
  return total;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
