// Few rows of bf16 times one packed panel, on vectors, with the bits that tiles give.
//
// A tile takes as long for one row as for sixteen, and the codes of its weights go through memory;
// here they stay in registers. What a tile adds to a sum for 32 k is `even + odd`: two chains of
// fused multiply-adds, over its even and its odd k, each from zero. Subnormal numbers are zeros
// there.
#pragma once

#include "gemm/cpu/pair_sums-inl.h"
#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/tiles-inl.h"
#include "gemm/cpu/weights-inl.h"

#include <xmmintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows that are computed so: more are as fast on tiles, or faster.
inline constexpr int kMaxWideRows = 2;
static_assert(kMaxWideRows <= kMostNarrowRows);

// Subnormal numbers are zeros, in operands and results, of what reads and writes memory meanwhile.
class SubnormalsAsZeros {
 public:
  CONCLAVE_KERNEL_INLINE SubnormalsAsZeros() : before_(_mm_getcsr()) {
    constexpr unsigned kOperands = 0x0040;
    constexpr unsigned kResults = 0x8000;
    _mm_setcsr(before_ | kOperands | kResults);
    settle_memory();
  }
  CONCLAVE_KERNEL_INLINE ~SubnormalsAsZeros() {
    settle_memory();
    _mm_setcsr(before_);
  }
  SubnormalsAsZeros(const SubnormalsAsZeros&) = delete;
  SubnormalsAsZeros& operator=(const SubnormalsAsZeros&) = delete;

 private:
  unsigned before_;
};

// Weights of two neighbouring k, as float32.
struct EvenAndOdd {
  Vec even[kPairVectors];
  Vec odd[kPairVectors];
};

// The values of some rows for up to kTiles tiles of k, as float32.
template <int kRows>
struct WideValues {
  static constexpr int64_t kTiles = 16;

  alignas(64) float even[kRows][kTiles * kTilePairs];
  alignas(64) float odd[kRows][kTiles * kTilePairs];
  bool is_finite[kRows];

  // Widens what a row has of `num_tiles` tiles: the first is at `values`, the next ones `stride`
  // bytes on.
  CONCLAVE_KERNEL_INLINE void widen(int row, const std::byte* values, int64_t stride,
                                    int64_t num_tiles) {
    Vec nothing = Vec::zero();
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const std::byte* const from = values + tile * stride;
      for (int64_t pair = 0; pair < kTilePairs; pair += Vec::kLanes) {
        const Vec pairs = Vec::load(from + pair * 4);
        const int64_t at = tile * kTilePairs + pair;
        pairs.bf16_first().store(even[row] + at);
        pairs.bf16_second().store(odd[row] + at);
        nothing = Vec::fma(pairs.bf16_first(), Vec::zero(), nothing);
        nothing = Vec::fma(pairs.bf16_second(), Vec::zero(), nothing);
      }
    }
    float lanes[Vec::kLanes];
    nothing.store(lanes);
    is_finite[row] = true;
    for (const float lane : lanes) is_finite[row] = is_finite[row] && lane == 0.0F;
  }
};

// The two chains of a tile, for each row and column. Pairs count from the first of the values.
template <int kRows>
struct WideChains {
  const float* even_values[kRows];
  const float* odd_values[kRows];
  Tile<kRows, kPairVectors> even;
  Tile<kRows, kPairVectors> odd;

  CONCLAVE_KERNEL_INLINE explicit WideChains(const WideValues<kRows>& values) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      even_values[r] = values.even[r];
      odd_values[r] = values.odd[r];
    }
    even.clear();
    odd.clear();
  }
  CONCLAVE_KERNEL_INLINE void add_even(int64_t pair, const EvenAndOdd& weights) {
    even.multiply_add_with(
        even_values, pair, [&](int j) __attribute__((always_inline)) { return weights.even[j]; });
  }
  CONCLAVE_KERNEL_INLINE void add_odd(int64_t pair, const EvenAndOdd& weights) {
    odd.multiply_add_with(
        odd_values, pair, [&](int j) __attribute__((always_inline)) { return weights.odd[j]; });
  }
  CONCLAVE_KERNEL_INLINE void add_to(Tile<kRows, kPairVectors>& sums) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) {
        sums.sum[r][j] = Vec::add(sums.sum[r][j], Vec::add(even.sum[r][j], odd.sum[r][j]));
      }
    }
  }
};

// Sums between memory and registers.
template <int kRows>
CONCLAVE_KERNEL_INLINE void load_wide(const float (*from)[64], Tile<kRows, kPairVectors>& sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPairVectors; ++j) sums.sum[r][j] = Vec::load(from[r] + j * Vec::kLanes);
  }
}
template <int kRows>
CONCLAVE_KERNEL_INLINE void store_wide(const Tile<kRows, kPairVectors>& sums, float (*to)[64]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPairVectors; ++j) sums.sum[r][j].store(to[r] + j * Vec::kLanes);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
