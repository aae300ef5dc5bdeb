// 8 columns by 8 32-bit lanes, in registers.
#pragma once

#include "gemm/cpu/simd-inl.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct Square8 {
  static constexpr int kSize = 8;
  using Vector = __m256i;
  // The same as numbers, which operators take.
  using Ints = int32_t __attribute__((vector_size(32)));
  using Floats = float __attribute__((vector_size(32)));
  Vector rows[8];

  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from) {
    rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  // The first `count` lanes, and zeros.
  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from, int count) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), places);
    rows[i] = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), mask);
  }

  // First 4 x 4 lanes within each half of a vector, then the halves.
  CONCLAVE_KERNEL_INLINE void transpose() {
    __m256i fours[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const __m256i low_01 = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
      const __m256i high_01 = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
      const __m256i low_23 = _mm256_unpacklo_epi32(rows[i + 2], rows[i + 3]);
      const __m256i high_23 = _mm256_unpackhi_epi32(rows[i + 2], rows[i + 3]);
      fours[i] = _mm256_unpacklo_epi64(low_01, low_23);
      fours[i + 1] = _mm256_unpackhi_epi64(low_01, low_23);
      fours[i + 2] = _mm256_unpacklo_epi64(high_01, high_23);
      fours[i + 3] = _mm256_unpackhi_epi64(high_01, high_23);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      rows[j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20);
      rows[4 + j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31);
    }
  }

  CONCLAVE_KERNEL_INLINE void store(int i, std::byte* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rows[i]);
  }
  CONCLAVE_KERNEL_INLINE void store_halves(int i, std::byte* even, std::byte* odd) const {
    const __m256i low = _mm256_and_si256(rows[i], _mm256_set1_epi32(0xffff));
    const __m256i high = _mm256_srli_epi32(rows[i], 16);
    // Each quarter has four of the one and four of the other.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(even), _mm256_castsi256_si128(packed));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(odd), _mm256_extracti128_si256(packed, 1));
  }

  // Lanes of 64 columns; a lane's bytes end in four rows. Of 4 bits, columns 0 to 31 are in the
  // lower halves of a row's bytes, and 32 to 63 in the upper ones.
  template <int kBits, bool kStreams>
  CONCLAVE_KERNEL_INLINE static void spread(const std::byte* lanes, std::byte* rows) {
    __m256i left[4];
    __m256i right[4];
    gather_bytes(lanes, left);
    gather_bytes(lanes + 128, right);
    const __m256i mask = _mm256_set1_epi8(0xf);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBits == 8) {
        put<kStreams>(left[i], right[i], rows + 64 * i);
      } else {
        const __m256i lower =
            _mm256_or_si256(_mm256_and_si256(left[i], mask),
                            _mm256_slli_epi16(_mm256_and_si256(right[i], mask), 4));
        const __m256i upper = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(left[i], 4), mask),
                                              _mm256_andnot_si256(mask, right[i]));
        put<kStreams>(lower, upper, rows + 64 * i);
      }
    }
  }

  static CONCLAVE_KERNEL_INLINE bool any(__m256i lanes) {
    return _mm256_testz_si256(lanes, lanes) == 0;
  }
  // Writes float32 numbers as float16, and returns what became of them.
  static CONCLAVE_KERNEL_INLINE __m256i store_f16(__m256i numbers, std::byte* to) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_castsi256_ps(numbers), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
    return _mm256_castps_si256(_mm256_cvtph_ps(halves));
  }
  // Writes the lowest bytes.
  static CONCLAVE_KERNEL_INLINE void store_bytes(__m256i lanes, std::byte* to) {
    const __m256i lowest = _mm256_and_si256(lanes, _mm256_set1_epi32(0xff));
    const __m128i pairs =
        _mm_packus_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
  }

 private:
  // Bytes 0 to 3 of 32 columns, each in a vector.
  CONCLAVE_KERNEL_INLINE static void gather_bytes(const std::byte* lanes, __m256i* bytes) {
    const __m256i by_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i by_quarter = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i eights[4];  // quarter b has byte b of 8 columns
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i columns = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes + 32 * i));
      eights[i] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(columns, by_byte), by_quarter);
    }
    const __m256i even_01 = _mm256_unpacklo_epi64(eights[0], eights[1]);
    const __m256i even_23 = _mm256_unpacklo_epi64(eights[2], eights[3]);
    const __m256i odd_01 = _mm256_unpackhi_epi64(eights[0], eights[1]);
    const __m256i odd_23 = _mm256_unpackhi_epi64(eights[2], eights[3]);
    bytes[0] = _mm256_permute2x128_si256(even_01, even_23, 0x20);
    bytes[1] = _mm256_permute2x128_si256(odd_01, odd_23, 0x20);
    bytes[2] = _mm256_permute2x128_si256(even_01, even_23, 0x31);
    bytes[3] = _mm256_permute2x128_si256(odd_01, odd_23, 0x31);
  }
  template <bool kStreams>
  CONCLAVE_KERNEL_INLINE static void put(__m256i first, __m256i second, std::byte* rows) {
    auto* const to = reinterpret_cast<__m256i*>(rows);
    if constexpr (kStreams) {
      _mm256_stream_si256(to, first);
      _mm256_stream_si256(to + 1, second);
    } else {
      _mm256_storeu_si256(to, first);
      _mm256_storeu_si256(to + 1, second);
    }
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
