// Codes whose values are whole numbers, as unsigned bytes for integer dot products: four
// neighbouring k of a column side by side in a 32-bit lane.
#pragma once

#include "gemm/cpu/simd-inl.h"
#include "quant/code_values.h"

#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The 64 columns of a panel. Which lane has which column is up to the format's width.
struct Quads {
  __m512i value[4];
};

template <class Format>
struct WholeWeights {
  static constexpr quant::WholeCodes kWhole = quant::whole_codes<Format>();
  static_assert(kWhole.fit);
  // Added to a weight, this makes it unsigned.
  static constexpr int32_t kOffset = -kWhole.least;
  static constexpr int64_t kRowBytes = Format::kBits * 8;

  // Four rows of a panel.
  static CONCLAVE_KERNEL_INLINE Quads load(const std::byte* codes) {
    return load_rows(codes, codes + kRowBytes, codes + 2 * kRowBytes, codes + 3 * kRowBytes);
  }
  // The first 1 to 3 of them; the bytes of the others are zero.
  static CONCLAVE_KERNEL_INLINE Quads load_first(const std::byte* codes, int64_t count) {
    const auto row = [&](int64_t k) { return codes + (k < count ? k : 0) * kRowBytes; };
    Quads quads = load_rows(row(0), row(1), row(2), row(3));
    const __m512i there = _mm512_set1_epi32((1 << (8 * count)) - 1);
#pragma GCC unroll 4
    for (__m512i& value : quads.value) value = _mm512_and_si512(value, there);
    return quads;
  }

  // Brings 64 numbers from the order of columns to that of the lanes of quads, or back: each is the
  // other's inverse.
  static CONCLAVE_KERNEL_INLINE void swap_order(__m512 (&of)[4]) {
    if constexpr (Format::kBits == 8) {
      swap_sixteenths(of);
    } else {
      swap_halves(of[0], of[1]);
      swap_halves(of[2], of[3]);
    }
  }

 private:
  static CONCLAVE_KERNEL_INLINE Quads load_rows(const std::byte* r0, const std::byte* r1,
                                                const std::byte* r2, const std::byte* r3) {
    if constexpr (Format::kBits == 8) {
      return interleave_bytes(unsigned_row(r0), unsigned_row(r1), unsigned_row(r2),
                              unsigned_row(r3));
    } else {
      return interleave_halves(half_rows(r0, r2), half_rows(r1, r3));
    }
  }

  // Lane 4 b + e of vector v has column 16 b + 4 v + e.
  static CONCLAVE_KERNEL_INLINE Quads interleave_bytes(__m512i r0, __m512i r1, __m512i r2,
                                                       __m512i r3) {
    const __m512i low01 = _mm512_unpacklo_epi8(r0, r1);
    const __m512i low23 = _mm512_unpacklo_epi8(r2, r3);
    const __m512i high01 = _mm512_unpackhi_epi8(r0, r1);
    const __m512i high23 = _mm512_unpackhi_epi8(r2, r3);
    return {{_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
             _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)}};
  }
  static CONCLAVE_KERNEL_INLINE __m512i unsigned_row(const std::byte* row) {
    static_assert(Format::kBits != 8 || (kOffset == 128 && Format::decode(0xff) == -1.0F &&
                                         Format::decode(0x7f) == 127.0F));
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
  static CONCLAVE_KERNEL_INLINE __m512i number_of(__m512i codes) {
    const __m512i halves = _mm512_and_si512(codes, _mm512_set1_epi8(0xf));
    if constexpr (codes_ascend()) return halves;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), halves);
  }

  // Whether a code is its value plus the offset.
  static consteval bool codes_ascend() {
    for (int code = 0; code < 16; ++code) {
      if (number(code) != code) return false;
    }
    return true;
  }
  static constexpr int number(int code) {
    return static_cast<int>(Format::decode(static_cast<uint8_t>(code)) / kWhole.unit) + kOffset;
  }
  struct Table {
    alignas(16) uint8_t of[16];
  };
  static consteval Table list_numbers() {
    Table table{};
    for (int code = 0; code < 16; ++code) table.of[code] = static_cast<uint8_t>(number(code));
    return table;
  }
  static CONCLAVE_KERNEL_INLINE __m128i table() {
    static constexpr Table kTable = list_numbers();
    return _mm_load_si128(reinterpret_cast<const __m128i*>(kTable.of));
  }

  static CONCLAVE_KERNEL_INLINE void swap_halves(__m512& a, __m512& b) {
    const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44);
    b = _mm512_shuffle_f32x4(a, b, 0xee);
    a = low;
  }
  // Transposes 4 x 4 blocks of four lanes.
  static CONCLAVE_KERNEL_INLINE void swap_sixteenths(__m512 (&of)[4]) {
    const __m512 low01 = _mm512_shuffle_f32x4(of[0], of[1], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(of[0], of[1], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(of[2], of[3], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(of[2], of[3], 0xee);
    of[0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
    of[1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    of[2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
    of[3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
