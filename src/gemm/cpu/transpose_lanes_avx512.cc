#define CONCLAVE_SIMD_AVX512

#include "gemm/cpu/transpose_lanes-inl.h"
#include "gemm/cpu/transpose_lanes.h"

namespace conclave::inline v0::gemm {
namespace isa_avx512 {
namespace {

struct Square16 {
  static constexpr int kSize = 16;
  __m512i rows[16];

  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from) {
    rows[i] = _mm512_loadu_si512(from);
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
};

}  // namespace
}  // namespace isa_avx512

int64_t transpose_lanes_avx512(const ColumnLanes& lanes, std::byte* panel) noexcept {
  return isa_avx512::transpose_lanes<isa_avx512::Square16>(lanes, panel);
}

}  // namespace conclave::inline v0::gemm
