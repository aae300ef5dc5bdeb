// 16 columns by 16 32-bit lanes, in registers.
#pragma once

#include "gemm/cpu/simd-inl.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct Square16 {
  static constexpr int kSize = 16;
  using Vector = __m512i;
  // The same as numbers, which operators take.
  using Ints = int32_t __attribute__((vector_size(64)));
  using Floats = float __attribute__((vector_size(64)));
  Vector rows[16];

  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from) {
    rows[i] = _mm512_loadu_si512(from);
  }

  // The first `count` lanes, and zeros.
  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from, int count) {
    rows[i] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << count) - 1U), from);
  }

  // First 4 x 4 lanes within each quarter of a vector, then the quarters.
  CONCLAVE_KERNEL_INLINE void transpose() {
    __m512i fours[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const __m512i low_01 = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      const __m512i high_01 = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
      const __m512i low_23 = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]);
      const __m512i high_23 = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
      fours[i] = _mm512_unpacklo_epi64(low_01, low_23);
      fours[i + 1] = _mm512_unpackhi_epi64(low_01, low_23);
      fours[i + 2] = _mm512_unpacklo_epi64(high_01, high_23);
      fours[i + 3] = _mm512_unpackhi_epi64(high_01, high_23);
    }
    // fours[4 r + j] has lanes j, 4 + j, 8 + j and 12 + j of columns 4 r to 4 r + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
      const __m512i odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
      const __m512i even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
      const __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
      rows[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
      rows[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
      rows[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
      rows[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
  }

  CONCLAVE_KERNEL_INLINE void store(int i, std::byte* to) const {
    _mm512_storeu_si512(to, rows[i]);
  }
  CONCLAVE_KERNEL_INLINE void store_halves(int i, std::byte* even, std::byte* odd) const {
    const auto put = [](std::byte* to, __m256i halves) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
    };
    put(even, _mm512_cvtepi32_epi16(rows[i]));
    put(odd, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rows[i], 16)));
  }

  // Lanes of 64 columns; a lane's bytes end in four rows. Of 4 bits, columns 0 to 31 are in the
  // lower halves of a row's bytes, and 32 to 63 in the upper ones.
  template <int kBits, bool kStreams>
  CONCLAVE_KERNEL_INLINE static void spread(const std::byte* lanes, std::byte* rows) {
    // Quarter b of each vector gets byte b of its 16 columns.
    const __m512i by_byte =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i by_quarter =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i quarters[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i columns = _mm512_load_si512(lanes + 64 * i);
      quarters[i] = _mm512_permutexvar_epi32(by_quarter, _mm512_shuffle_epi8(columns, by_byte));
    }
    const __m512i left_02 = _mm512_shuffle_i32x4(quarters[0], quarters[1], 0x88);
    const __m512i left_13 = _mm512_shuffle_i32x4(quarters[0], quarters[1], 0xdd);
    const __m512i right_02 = _mm512_shuffle_i32x4(quarters[2], quarters[3], 0x88);
    const __m512i right_13 = _mm512_shuffle_i32x4(quarters[2], quarters[3], 0xdd);
    if constexpr (kBits == 8) {
      put_rows<kStreams>(left_02, right_02, left_13, right_13, rows);
    } else {
      put_rows<kStreams>(lower(left_02, right_02), upper(left_02, right_02),
                         lower(left_13, right_13), upper(left_13, right_13), rows);
    }
  }

  static CONCLAVE_KERNEL_INLINE bool any(__m512i lanes) {
    return _mm512_test_epi32_mask(lanes, lanes) != 0;
  }
  // Writes float32 numbers as float16, and returns what became of them.
  static CONCLAVE_KERNEL_INLINE __m512i store_f16(__m512i numbers, std::byte* to) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_castsi512_ps(numbers), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
    return _mm512_castps_si512(_mm512_cvtph_ps(halves));
  }
  // Writes the lowest bytes.
  static CONCLAVE_KERNEL_INLINE void store_bytes(__m512i lanes, std::byte* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(lanes));
  }

 private:
  // Halves of bytes, of the left columns and above them of the right ones.
  CONCLAVE_KERNEL_INLINE static __m512i lower(__m512i left, __m512i right) {
    const __m512i mask = _mm512_set1_epi8(0xf);
    return _mm512_or_si512(_mm512_and_si512(left, mask),
                           _mm512_slli_epi16(_mm512_and_si512(right, mask), 4));
  }
  CONCLAVE_KERNEL_INLINE static __m512i upper(__m512i left, __m512i right) {
    const __m512i mask = _mm512_set1_epi8(0xf);
    return _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(left, 4), mask),
                           _mm512_andnot_si512(mask, right));
  }
  // Rows of the first and third byte of lanes, and of the second and fourth.
  template <bool kStreams>
  CONCLAVE_KERNEL_INLINE static void put_rows(__m512i first_02, __m512i second_02, __m512i first_13,
                                              __m512i second_13, std::byte* rows) {
    put<kStreams>(_mm512_shuffle_i32x4(first_02, second_02, 0x88), rows);
    put<kStreams>(_mm512_shuffle_i32x4(first_13, second_13, 0x88), rows + 64);
    put<kStreams>(_mm512_shuffle_i32x4(first_02, second_02, 0xdd), rows + 128);
    put<kStreams>(_mm512_shuffle_i32x4(first_13, second_13, 0xdd), rows + 192);
  }
  template <bool kStreams>
  CONCLAVE_KERNEL_INLINE static void put(__m512i row, std::byte* to) {
    if constexpr (kStreams) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), row);
    } else {
      _mm512_storeu_si512(to, row);
    }
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
