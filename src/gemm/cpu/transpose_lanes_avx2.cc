#define CONCLAVE_SIMD_AVX2

#include "gemm/cpu/transpose_lanes-inl.h"
#include "gemm/cpu/transpose_lanes.h"

namespace conclave::inline v0::gemm {
namespace isa_avx2 {
namespace {

struct Square8 {
  static constexpr int kSize = 8;
  __m256i rows[8];

  CONCLAVE_KERNEL_INLINE void load(int i, const std::byte* from) {
    rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
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
};

}  // namespace
}  // namespace isa_avx2

int64_t transpose_lanes_avx2(const ColumnLanes& lanes, std::byte* panel) noexcept {
  return isa_avx2::transpose_lanes<isa_avx2::Square8>(lanes, panel);
}

}  // namespace conclave::inline v0::gemm
