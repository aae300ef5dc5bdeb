// One step down a packed panel, per weight type and arithmetic: it adds kStepK values of k to a
// tile of accumulators. Each accumulator takes one fused multiply-add per k, in ascending k,
// whatever the number of rows in the tile; that makes results independent of the batch and, for
// float32 arithmetic, equal on every instruction set.
#pragma once

#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Column of vector `j` of `kVectors` in pass `pass` over a panel: the lower half of the vectors
// covers columns of [0, 32), the upper half the same columns of [32, 64), so that gate and up of
// an output meet in one tile.
template <int kVectors>
CONCLAVE_KERNEL_INLINE constexpr int column_of(int pass, int j) {
  constexpr int kHalf = kVectors / 2;
  return (j < kHalf ? 0 : 32) + (pass * kHalf + j % kHalf) * Vec::kLanes;
}

template <int kRows, int kVectors>
struct Tile {
  Vec sum[kRows][kVectors];

  CONCLAVE_KERNEL_INLINE void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[r][j] = Vec::zero();
    }
  }

  // Adds one k: row r's activation times the weights of all vectors. It holds the operands of the
  // smaller number and loads the others one by one: beside the sums, 16 registers hold no more.
  template <class Load>
  CONCLAVE_KERNEL_INLINE void multiply_add(const float* const (&rows)[kRows], int64_t k,
                                           const std::byte* panel_row, int pass) {
    multiply_add_with(rows, k, [&](int j) {
      return Load::load(panel_row + column_of<kVectors>(pass, j) * Load::kLaneBytes);
    });
  }

  // weights(j): those of vector j.
  template <class Weights>
  CONCLAVE_KERNEL_INLINE void multiply_add_with(const float* const (&rows)[kRows], int64_t k,
                                                const Weights& weights) {
    if constexpr (kRows < kVectors) {
      Vec x[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r] = Vec::broadcast(rows[r][k]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const Vec w = weights(j);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r][j].accumulate(x[r], w);
      }
    } else {
      Vec w[kVectors];
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) w[j] = weights(j);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec x = Vec::broadcast(rows[r][k]);
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) sum[r][j].accumulate(x, w[j]);
      }
    }
  }
};

struct LoadF32 {
  static constexpr int kLaneBytes = 4;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load(p); }
};
struct LoadF16 {
  static constexpr int kLaneBytes = 2;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load_f16(p); }
};
struct LoadFirstBf16 {
  static constexpr int kLaneBytes = 4;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load_bf16_first(p); }
};
struct LoadSecondBf16 {
  static constexpr int kLaneBytes = 4;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load_bf16_second(p); }
};

// One weight per lane, widened by Load.
template <class Load>
struct WidenedWeights {
  using Activation = float;
  static constexpr int kStepK = 1;
  static constexpr int kLaneBytes = Load::kLaneBytes;

  template <int kRows, int kVectors>
  static CONCLAVE_KERNEL_INLINE void step(Tile<kRows, kVectors>& tile,
                                          const float* const (&rows)[kRows], int64_t k,
                                          const std::byte* panel_row, int pass) {
    tile.template multiply_add<Load>(rows, k, panel_row, pass);
  }
};
using F32Weights = WidenedWeights<LoadF32>;
using F16Weights = WidenedWeights<LoadF16>;

// Two neighbouring k per lane.
struct Bf16Weights {
  using Activation = float;
  static constexpr int kStepK = 2;
  static constexpr int kLaneBytes = 4;

  template <int kRows, int kVectors>
  static CONCLAVE_KERNEL_INLINE void step(Tile<kRows, kVectors>& tile,
                                          const float* const (&rows)[kRows], int64_t k,
                                          const std::byte* panel_row, int pass) {
    tile.template multiply_add<LoadFirstBf16>(rows, k, panel_row, pass);
    tile.template multiply_add<LoadSecondBf16>(rows, k + 1, panel_row, pass);
  }
};

#if defined(CONCLAVE_SIMD_AVX512_BF16) || defined(CONCLAVE_SIMD_AVX512_VBMI)
// Dot products of bf16 pairs: activations are bf16 too.
struct Bf16DotWeights {
  using Activation = uint16_t;
  static constexpr int kStepK = 2;
  static constexpr int kLaneBytes = 4;

  template <int kRows, int kVectors>
  static CONCLAVE_KERNEL_INLINE void step(Tile<kRows, kVectors>& tile,
                                          const uint16_t* const (&rows)[kRows], int64_t k,
                                          const std::byte* panel_row, int pass) {
    Vec w[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      w[j] = Vec::load(panel_row + column_of<kVectors>(pass, j) * kLaneBytes);
    }
    add_pairs(tile, rows, k, w);
  }

  // Adds k and k + 1: each row's pair times those of the weights.
  template <int kRows, int kVectors>
  static CONCLAVE_KERNEL_INLINE void add_pairs(Tile<kRows, kVectors>& tile,
                                               const uint16_t* const (&rows)[kRows], int64_t k,
                                               const Vec (&weights)[kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, rows[r] + k, sizeof(pair));
      __m512i pairs = _mm512_set1_epi32(pair);
#if defined(__clang__)
      // Clang 16 recurses without end when it lowers this broadcast as one of bf16 elements.
      asm("" : "+v"(pairs));
#endif
      const auto x = reinterpret_cast<__m512bh>(pairs);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const auto w = reinterpret_cast<__m512bh>(weights[j].value);
        tile.sum[r][j].value = _mm512_dpbf16_ps(tile.sum[r][j].value, x, w);
      }
    }
  }
};
#endif

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
