// Products of whole numbers with 16 lanes of int32: codes as unsigned bytes, four neighbouring k of
// a column side by side in a lane. Included by simd-inl.h only.
#pragma once

#include "gemm/cpu/code_row_avx512-inl.h"
#include "gemm/cpu/simd_avx512-inl.h"
#include "gemm/cpu/whole_format-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// 24 sums leave registers for weights on their way into quads.
inline constexpr int kMaxIntegerTileRows = 6;

struct Ints {
  __m512i value;

  static CONCLAVE_KERNEL_INLINE Ints broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static CONCLAVE_KERNEL_INLINE Ints load(const void* p) { return {_mm512_loadu_si512(p)}; }
  CONCLAVE_KERNEL_INLINE void store(void* p) const { _mm512_storeu_si512(p, value); }
  static CONCLAVE_KERNEL_INLINE Ints add(Ints a, Ints b) {
    return {_mm512_add_epi32(a.value, b.value)};
  }
  static CONCLAVE_KERNEL_INLINE Ints both(Ints a, Ints b) {
    return {_mm512_and_si512(a.value, b.value)};
  }
  CONCLAVE_KERNEL_INLINE Vec to_floats() const { return {_mm512_cvtepi32_ps(value)}; }
  // Adds the products of four unsigned bytes with four signed ones to each lane.
  template <class Weights>
  CONCLAVE_KERNEL_INLINE void add_products(Ints weights, Ints codes) {
    // Spelled out for the reason that Vec::accumulate is.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(value) : "v"(weights.value), "v"(codes.value));
  }
};

// The 64 columns of a panel. Which lane has which column is up to the format's width.
struct Quads {
  static constexpr int kSlices = 1;
  Ints value[4];
};

template <class Format>
struct WholeWeights : WholeFormat<Format> {
  using WholeFormat<Format>::kRowBytes;
  // Rows of 6 bits take twice as long to become quads as rows of others.
  static constexpr bool kStoresQuads = Format::kBits == 6;

  static CONCLAVE_KERNEL_INLINE Quads load_rows(const std::byte* r0, const std::byte* r1,
                                                const std::byte* r2, const std::byte* r3,
                                                int /*slice*/) {
    if constexpr (Format::kBits == 8) {
      return interleave_bytes(unsigned_row(r0), unsigned_row(r1), unsigned_row(r2),
                              unsigned_row(r3));
    } else if constexpr (Format::kBits == 6) {
      return interleave_sixes(half_rows(r0, r2), half_rows(r1, r3), upper_twos(r0, r1, r2, r3));
    } else {
      return interleave_halves(half_rows(r0, r2), half_rows(r1, r3));
    }
  }

  // Brings 64 numbers from the order of columns to that of the lanes of quads, or back: each is the
  // other's inverse.
  static CONCLAVE_KERNEL_INLINE void swap_order(Vec (&of)[4]) {
    if constexpr (Format::kBits == 8) {
      swap_sixteenths(of);
    } else {
      swap_halves(of[0], of[1]);
      swap_halves(of[2], of[3]);
    }
  }

 private:
  // Lane 4 b + e of vector v has column 16 b + 4 v + e.
  static CONCLAVE_KERNEL_INLINE Quads interleave_bytes(__m512i r0, __m512i r1, __m512i r2,
                                                       __m512i r3) {
    const __m512i low01 = _mm512_unpacklo_epi8(r0, r1);
    const __m512i low23 = _mm512_unpacklo_epi8(r2, r3);
    const __m512i high01 = _mm512_unpackhi_epi8(r0, r1);
    const __m512i high23 = _mm512_unpackhi_epi8(r2, r3);
    return {{{_mm512_unpacklo_epi16(low01, low23)},
             {_mm512_unpackhi_epi16(low01, low23)},
             {_mm512_unpacklo_epi16(high01, high23)},
             {_mm512_unpackhi_epi16(high01, high23)}}};
  }
  static CONCLAVE_KERNEL_INLINE __m512i unsigned_row(const std::byte* row) {
    static_assert(WholeWeights::bytes_are_twos_complement());
    return _mm512_xor_si512(_mm512_loadu_si512(row), _mm512_set1_epi8(-128));
  }

  // Bytes have the column 32 on in their upper halves. Vectors 0 and 1 have the columns 0 to 7, 16
  // to 23 and 8 to 15, 24 to 31; vectors 2 and 3 those 32 on.
  static CONCLAVE_KERNEL_INLINE Quads interleave_halves(__m512i rows02, __m512i rows13) {
    const __m512i first = join_pairs(_mm512_unpacklo_epi8(rows02, rows13));
    const __m512i second = join_pairs(_mm512_unpackhi_epi8(rows02, rows13));
    return {{number_of(first), number_of(second), number_of(_mm512_srli_epi16(first, 4)),
             number_of(_mm512_srli_epi16(second, 4))}};
  }
  // Lane by lane, a byte of `upper` has the upper two bits of the columns of all vectors
  // (SixBitRow).
  static CONCLAVE_KERNEL_INLINE Quads interleave_sixes(__m512i rows02, __m512i rows13,
                                                       __m512i upper) {
    static_assert(Format::kBits != 6 || WholeWeights::codes_ascend());
    const __m512i first = join_pairs(_mm512_unpacklo_epi8(rows02, rows13));
    const __m512i second = join_pairs(_mm512_unpackhi_epi8(rows02, rows13));
    return {{join_six(first, _mm512_slli_epi16(upper, 4)),
             join_six(second, _mm512_slli_epi16(upper, 2)),
             join_six(_mm512_srli_epi16(first, 4), upper),
             join_six(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(upper, 2))}};
  }
  static CONCLAVE_KERNEL_INLINE Ints join_six(__m512i half, __m512i upper) {
    constexpr int kFirstSays = 0xca;  // a ? b : c
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0xf), half, upper, kFirstSays);
    return {_mm512_and_si512(code, _mm512_set1_epi8(0x3f))};
  }
  // Byte i of four rows becomes lane i.
  static CONCLAVE_KERNEL_INLINE __m512i upper_twos(const std::byte* r0, const std::byte* r1,
                                                   const std::byte* r2, const std::byte* r3) {
    const auto load = [](const std::byte* row) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 32));
    };
    __m512i rows = _mm512_castsi128_si512(load(r0));
    rows = _mm512_inserti32x4(rows, load(r1), 1);
    rows = _mm512_inserti32x4(rows, load(r2), 2);
    rows = _mm512_inserti32x4(rows, load(r3), 3);
    const __m512i fours = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m128i bytes = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(fours, rows),
                               _mm512_broadcast_i32x4(bytes));
  }
  static CONCLAVE_KERNEL_INLINE __m512i half_rows(const std::byte* low, const std::byte* high) {
    const __m256i lower = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
  }
  // Pairs of k in the lower half meet those of the next k in the upper half.
  static CONCLAVE_KERNEL_INLINE __m512i join_pairs(__m512i pairs) {
    const __m512i places =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, pairs);
  }
  static CONCLAVE_KERNEL_INLINE Ints number_of(__m512i codes) {
    const __m512i halves = _mm512_and_si512(codes, _mm512_set1_epi8(0xf));
    if constexpr (WholeWeights::codes_ascend()) return {halves};
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), halves)};
  }

  static CONCLAVE_KERNEL_INLINE __m128i table() {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(kNumbers<Format>.of));
  }

  static CONCLAVE_KERNEL_INLINE void swap_halves(Vec& a, Vec& b) {
    const __m512 low = _mm512_shuffle_f32x4(a.value, b.value, 0x44);
    b.value = _mm512_shuffle_f32x4(a.value, b.value, 0xee);
    a.value = low;
  }
  // Transposes 4 x 4 blocks of four lanes.
  static CONCLAVE_KERNEL_INLINE void swap_sixteenths(Vec (&of)[4]) {
    const __m512 low01 = _mm512_shuffle_f32x4(of[0].value, of[1].value, 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(of[0].value, of[1].value, 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(of[2].value, of[3].value, 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(of[2].value, of[3].value, 0xee);
    of[0].value = _mm512_shuffle_f32x4(low01, low23, 0x88);
    of[1].value = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    of[2].value = _mm512_shuffle_f32x4(high01, high23, 0x88);
    of[3].value = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
