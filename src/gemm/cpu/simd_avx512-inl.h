// 16 float32 lanes. Included by simd-inl.h and what it includes only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct Vec {
  static constexpr int kLanes = 16;
  __m512 value;

  static CONCLAVE_KERNEL_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
  static CONCLAVE_KERNEL_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static CONCLAVE_KERNEL_INLINE Vec load(const void* p) { return {_mm512_loadu_ps(p)}; }
  // Load pairs of bf16 in 32-bit lanes and widen the first, or the second, of each.
  static CONCLAVE_KERNEL_INLINE Vec load_bf16_first(const void* p) { return load(p).bf16_first(); }
  static CONCLAVE_KERNEL_INLINE Vec load_bf16_second(const void* p) {
    return load(p).bf16_second();
  }
  // The same of pairs that are here.
  CONCLAVE_KERNEL_INLINE Vec bf16_first() const {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(value), 16))};
  }
  CONCLAVE_KERNEL_INLINE Vec bf16_second() const {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(value), mask))};
  }
  static CONCLAVE_KERNEL_INLINE Vec load_f16(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
  }

  // Powers of two, 2^(code - 127). No code is 255.
  static CONCLAVE_KERNEL_INLINE Vec load_power_of_two(const void* p) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    // 2^-127 is subnormal, and its bits lie between those of 0 and of 2^-126.
    const __m512i bits = _mm512_slli_epi32(code, 23);
    return {_mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x00400000)))};
  }

  // Signed bytes.
  static CONCLAVE_KERNEL_INLINE Vec load_signed_bytes(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
  }
  // The lower, or the upper, halves of bytes, from 0 to 15.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec load_u4(const void* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m512i halves =
        kUpper ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(0xf));
    return {_mm512_cvtepi32_ps(halves)};
  }
  // The codes of 6 bits of 16 columns of a panel row (SixBitRow), or of those 32 columns on, less
  // 32.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec load_i6(const std::byte* row, int column) {
    const auto* const halves = reinterpret_cast<const __m128i*>(row + column);
    __m512i half = _mm512_cvtepu8_epi32(_mm_loadu_si128(halves));
    if constexpr (kUpper) half = _mm512_srli_epi32(half, 4);
    // The second 8 columns share the bytes of the first.
    int64_t four;
    __builtin_memcpy(&four, row + 32 + column / 2, sizeof(four));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(four));
    const __m512i upper =
        kUpper ? _mm512_srlv_epi32(bytes,
                                   _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0))
               : _mm512_sllv_epi32(
                     bytes, _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4));
    constexpr int kFirstSays = 0xca;  // a ? b : c
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xf), half, upper, kFirstSays);
    const __m512i six = _mm512_and_si512(code, _mm512_set1_epi32(0x3f));
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(six, _mm512_set1_epi32(32)))};
  }
  // The values of the lower, or the upper, halves of bytes, by a table of 16.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec look_up_u4(const float* table, const void* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    // A permutation reads the low 4 bits.
    const __m512i halves = kUpper ? _mm512_srli_epi32(bytes, 4) : bytes;
    return {_mm512_permutexvar_ps(halves, _mm512_loadu_ps(table))};
  }

  // e5m2 is the upper byte of f16.
  static CONCLAVE_KERNEL_INLINE Vec load_e5m2(const void* p) {
    const __m128i code = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(code), 8))};
  }
  // Converts through f16, whose exponent bias is 8 larger: subnormal codes cost no more than
  // others.
  static CONCLAVE_KERNEL_INLINE Vec load_e4m3(const void* p) {
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    // The sign is in bits 15 and 14 after the shift.
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(~0x4000));
    const __m256i negative = _mm256_or_si256(bits, _mm256_set1_epi16(-0x8000));
    const __m256i nan = _mm256_cmpeq_epi16(negative, _mm256_set1_epi16(0x3f80 - 0x8000));
    return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(bits, nan)), _mm512_set1_ps(256.0F))};
  }

  static CONCLAVE_KERNEL_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
  }
  // a * b - c
  static CONCLAVE_KERNEL_INLINE Vec fms(Vec a, Vec b, Vec c) {
    return {_mm512_fmsub_ps(a.value, b.value, c.value)};
  }
  // *this = a * b + *this. The instruction is spelled out because GCC otherwise lets an accumulator
  // change its register within a step, which costs copies and, with a full register file, stores.
  CONCLAVE_KERNEL_INLINE void accumulate(Vec a, Vec b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(value) : "v"(a.value), "v"(b.value));
  }
  static CONCLAVE_KERNEL_INLINE Vec negative_magnitude(Vec a) {
    return {_mm512_or_ps(a.value, _mm512_set1_ps(-0.0F))};
  }
  static CONCLAVE_KERNEL_INLINE Vec power_of_two(Vec t) {
    const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(t.value), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
  }
  static CONCLAVE_KERNEL_INLINE Vec select_negative(Vec a, Vec b, Vec c) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(a.value));
    return {_mm512_mask_blend_ps(negative, c.value, b.value)};
  }

  // A mask of the first `count` lanes, 0 <= count <= kLanes.
  static CONCLAVE_KERNEL_INLINE __mmask16 first(int64_t count) {
    return static_cast<__mmask16>((1U << count) - 1U);
  }
  CONCLAVE_KERNEL_INLINE Vec keep_first(int64_t count) const {
    return {_mm512_maskz_mov_ps(first(count), value)};
  }
  CONCLAVE_KERNEL_INLINE void store(void* p) const { _mm512_storeu_ps(p, value); }
  CONCLAVE_KERNEL_INLINE void store_first(void* p, int64_t count) const {
    _mm512_mask_storeu_ps(p, first(count), value);
  }
  // Stores bf16, rounded to nearest even; NaN stays a quiet NaN.
  CONCLAVE_KERNEL_INLINE void store_bf16(void* p) const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounding = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_add_epi32(bits, rounding);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i result = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
  }
};

CONCLAVE_KERNEL_INLINE void prefetch_line(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
