// Products of bytes by AVX2. Included by simd-inl.h only.
#pragma once

#include <cstdint>
#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Adds the products of four unsigned bytes, at most kMost, with four signed ones to each lane. The
// instruction for bytes saturates sums of two products: it is taken where none can be that large.
template <int32_t kMost>
CONCLAVE_KERNEL_INLINE void add_byte_products(__m256i& sum, __m256i weights, __m256i codes) {
  if constexpr (2 * kMost * 128 <= INT16_MAX) {
    const __m256i pairs = _mm256_maddubs_epi16(weights, codes);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  } else {
    const __m256i even_weights = _mm256_and_si256(weights, _mm256_set1_epi16(0xff));
    const __m256i odd_weights = _mm256_srli_epi16(weights, 8);
    const __m256i even_codes = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
    const __m256i odd_codes = _mm256_srai_epi16(codes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even_weights, even_codes));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd_weights, odd_codes));
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
