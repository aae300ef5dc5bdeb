// Products of whole numbers with 8 lanes of int32: codes as unsigned bytes, four neighbouring k of
// a column side by side in a lane. Included by simd-inl.h only, behind a header with
// add_byte_products.
#pragma once

#include "gemm/cpu/code_row_avx2-inl.h"
#include "gemm/cpu/simd_avx2-inl.h"
#include "gemm/cpu/whole_format-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kMaxIntegerTileRows = 2;
inline constexpr int kStripTileRows = 6;

struct Ints {
  __m256i value;

  static CONCLAVE_KERNEL_INLINE Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static CONCLAVE_KERNEL_INLINE Ints load(const void* p) { return {Vec::load_bits(p)}; }
  static CONCLAVE_KERNEL_INLINE Ints add(Ints a, Ints b) {
    return {_mm256_add_epi32(a.value, b.value)};
  }
  CONCLAVE_KERNEL_INLINE void store(void* p) const {
    _mm256_storeu_si256(static_cast<__m256i*>(p), value);
  }
  static CONCLAVE_KERNEL_INLINE Ints both(Ints a, Ints b) {
    return {_mm256_and_si256(a.value, b.value)};
  }
  CONCLAVE_KERNEL_INLINE Vec to_floats() const { return {_mm256_cvtepi32_ps(value)}; }
  // Adds the products of four unsigned bytes with four signed ones to each lane.
  template <class Weights>
  CONCLAVE_KERNEL_INLINE void add_products(Ints weights, Ints codes) {
    add_byte_products<Weights::kMost>(value, weights.value, codes.value);
  }
};

// 32 columns of a panel, its lower or its upper half.
struct Quads {
  static constexpr int kSlices = 2;
  Ints value[4];
};

template <class Format>
struct WholeWeights : WholeFormat<Format> {
  using WholeFormat<Format>::kRowBytes;

  static CONCLAVE_KERNEL_INLINE Quads load_rows(const std::byte* r0, const std::byte* r1,
                                                const std::byte* r2, const std::byte* r3,
                                                int slice) {
    return interleave(unsigned_row(r0, slice), unsigned_row(r1, slice), unsigned_row(r2, slice),
                      unsigned_row(r3, slice));
  }

  // Brings 32 numbers from the order of columns to that of the lanes of quads, or back: each is the
  // other's inverse.
  static CONCLAVE_KERNEL_INLINE void swap_order(Vec (&of)[4]) {
    swap_halves(of[0], of[2]);
    swap_halves(of[1], of[3]);
  }

 private:
  static CONCLAVE_KERNEL_INLINE __m256i unsigned_row(const std::byte* row, int slice) {
    if constexpr (Format::kBits == 8) {
      static_assert(WholeWeights::bytes_are_twos_complement());
      return _mm256_xor_si256(Vec::load_bits(row + slice * 32), _mm256_set1_epi8(-128));
    } else {
      // Bytes have the column 32 on in their upper halves.
      const __m256i bytes = Vec::load_bits(row);
      const __m256i halves =
          _mm256_and_si256(slice == 0 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(0xf));
      if constexpr (Format::kBits == 6) return _mm256_or_si256(halves, upper_twos(row, slice));
      if constexpr (WholeWeights::codes_ascend()) return halves;
      const auto* const numbers = reinterpret_cast<const __m128i*>(kNumbers<Format>.of);
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(numbers)), halves);
    }
  }
  // The upper two bits of codes of 6 (SixBitRow), where they belong in a byte.
  static CONCLAVE_KERNEL_INLINE __m256i upper_twos(const std::byte* row, int slice) {
    static_assert(Format::kBits != 6 || WholeWeights::codes_ascend());
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 32));
    const __m256i twice = _mm256_permute4x64_epi64(_mm256_castsi128_si256(bytes), 0x50);
    const __m256i upper = slice == 0 ? _mm256_sllv_epi64(twice, _mm256_set_epi64x(2, 4, 2, 4))
                                     : _mm256_srlv_epi64(twice, _mm256_set_epi64x(2, 0, 2, 0));
    return _mm256_and_si256(upper, _mm256_set1_epi8(0x30));
  }
  // Vectors have the columns 0 to 3, 8 to 11, 4 to 7 and 12 to 15 in their lower halves, and those
  // 16 on in their upper halves.
  static CONCLAVE_KERNEL_INLINE Quads interleave(__m256i r0, __m256i r1, __m256i r2, __m256i r3) {
    const __m256i low01 = _mm256_unpacklo_epi8(r0, r1);
    const __m256i low23 = _mm256_unpacklo_epi8(r2, r3);
    const __m256i high01 = _mm256_unpackhi_epi8(r0, r1);
    const __m256i high23 = _mm256_unpackhi_epi8(r2, r3);
    return {{{_mm256_unpacklo_epi16(low01, low23)},
             {_mm256_unpacklo_epi16(high01, high23)},
             {_mm256_unpackhi_epi16(low01, low23)},
             {_mm256_unpackhi_epi16(high01, high23)}}};
  }
  static CONCLAVE_KERNEL_INLINE void swap_halves(Vec& a, Vec& b) {
    const __m256 low = _mm256_permute2f128_ps(a.value, b.value, 0x20);
    b.value = _mm256_permute2f128_ps(a.value, b.value, 0x31);
    a.value = low;
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
