// 8 float32 lanes. Included by simd-inl.h only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct Vec {
  static constexpr int kLanes = 8;
  __m256 value;

  static CONCLAVE_KERNEL_INLINE __m256i load_bits(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static CONCLAVE_KERNEL_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
  static CONCLAVE_KERNEL_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static CONCLAVE_KERNEL_INLINE Vec load(const void* p) {
    return {_mm256_loadu_ps(static_cast<const float*>(p))};
  }
  // Load pairs of bf16 in 32-bit lanes and widen the first, or the second, of each.
  static CONCLAVE_KERNEL_INLINE Vec load_bf16_first(const void* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16))};
  }
  static CONCLAVE_KERNEL_INLINE Vec load_bf16_second(const void* p) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_bits(p), mask))};
  }
  static CONCLAVE_KERNEL_INLINE Vec load_f16(const void* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
  }

  // Powers of two, 2^(code - 127). No code is 255.
  static CONCLAVE_KERNEL_INLINE Vec load_power_of_two(const void* p) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    // 2^-127 is subnormal, and its bits lie between those of 0 and of 2^-126.
    const __m256i bits = _mm256_slli_epi32(code, 23);
    return {_mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)))};
  }

  // Signed bytes.
  static CONCLAVE_KERNEL_INLINE Vec load_signed_bytes(const void* p) {
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
  }
  // The lower, or the upper, halves of bytes, from 0 to 15.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec load_u4(const void* p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    const __m256i halves =
        kUpper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(0xf));
    return {_mm256_cvtepi32_ps(halves)};
  }
  // The codes of 6 bits of 8 columns of a panel row (SixBitRow), or of those 32 columns on,
  // less 32.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec load_i6(const std::byte* row, int column) {
    const auto widen = [](const std::byte* p) __attribute__((always_inline)) {
      return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    };
    const __m256i bytes = widen(row + column);
    const __m256i half =
        kUpper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(0xf));
    const __m256i four = widen(row + 32 + column / 16 * 8);
    const int second = column / 8 % 2 * 2;
    const __m256i upper = kUpper ? _mm256_srlv_epi32(four, _mm256_set1_epi32(second))
                                 : _mm256_sllv_epi32(four, _mm256_set1_epi32(4 - second));
    const __m256i code = _mm256_or_si256(half, _mm256_and_si256(upper, _mm256_set1_epi32(0x30)));
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(32)))};
  }
  // The values of the lower, or the upper, halves of bytes, by a table of 16.
  template <bool kUpper>
  static CONCLAVE_KERNEL_INLINE Vec look_up_u4(const float* table, const void* p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    const __m256i halves = kUpper ? _mm256_srli_epi32(bytes, 4) : bytes;
    // A permutation reads the low 3 bits; the fourth, as the sign, says which of two to take.
    const __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), halves);
    const __m256 second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), halves);
    return {_mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(halves, 28)))};
  }

  // e5m2 is the upper byte of f16.
  static CONCLAVE_KERNEL_INLINE Vec load_e5m2(const void* p) {
    const __m128i code = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return {_mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), code))};
  }
  // Converts through f16, whose exponent bias is 8 larger: subnormal codes cost no more than
  // others.
  static CONCLAVE_KERNEL_INLINE Vec load_e4m3(const void* p) {
    const __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    // The sign is in bits 15 and 14 after the shift.
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16(~0x4000));
    const __m128i negative = _mm_or_si128(bits, _mm_set1_epi16(-0x8000));
    const __m128i nan = _mm_cmpeq_epi16(negative, _mm_set1_epi16(0x3f80 - 0x8000));
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(bits, nan)), _mm256_set1_ps(256.0F))};
  }

  static CONCLAVE_KERNEL_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.value, b.value)}; }
  static CONCLAVE_KERNEL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
  // a * b - c
  static CONCLAVE_KERNEL_INLINE Vec fms(Vec a, Vec b, Vec c) {
    return {_mm256_fmsub_ps(a.value, b.value, c.value)};
  }
  // *this = a * b + *this. The instruction is spelled out because GCC otherwise lets an accumulator
  // change its register within a step, which costs copies and, with a full register file, stores.
  CONCLAVE_KERNEL_INLINE void accumulate(Vec a, Vec b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(value) : "x"(a.value), "x"(b.value));
  }
  static CONCLAVE_KERNEL_INLINE Vec negative_magnitude(Vec a) {
    return {_mm256_or_ps(a.value, _mm256_set1_ps(-0.0F))};
  }
  static CONCLAVE_KERNEL_INLINE Vec power_of_two(Vec t) {
    const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(t.value), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
  }
  static CONCLAVE_KERNEL_INLINE Vec select_negative(Vec a, Vec b, Vec c) {
    return {_mm256_blendv_ps(c.value, b.value, a.value)};
  }

  // A mask of all ones in the first `count` lanes, 0 <= count <= kLanes.
  static CONCLAVE_KERNEL_INLINE __m256i first(int64_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
  }
  CONCLAVE_KERNEL_INLINE Vec keep_first(int64_t count) const {
    return {_mm256_and_ps(value, _mm256_castsi256_ps(first(count)))};
  }
  CONCLAVE_KERNEL_INLINE void store(void* p) const {
    _mm256_storeu_ps(static_cast<float*>(p), value);
  }
  CONCLAVE_KERNEL_INLINE void store_first(void* p, int64_t count) const {
    _mm256_maskstore_ps(static_cast<float*>(p), first(count), value);
  }
};

CONCLAVE_KERNEL_INLINE void prefetch_line(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
