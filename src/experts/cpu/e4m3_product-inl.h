// reference_e4m3_product in vectors: lanes are rows of a panel, so that each keeps the order of its
// sum. Several rows of activations share each code that is decoded.
#pragma once

#include "experts/e4m3_panel.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::experts::CONCLAVE_ISA_NAMESPACE {

using gemm::CONCLAVE_ISA_NAMESPACE::Vec;

// Vectors of a panel that are computed together: enough chains of sums to hide their latency with
// one row of activations, and few enough to stay in registers with kMostRows.
inline constexpr int kVecs = 4;
inline constexpr int kMostRows = Vec::kLanes == 16 ? 4 : 2;
inline constexpr int64_t kLanesTogether = int64_t{kVecs} * Vec::kLanes;
static_assert(kE4m3PanelRows % kLanesTogether == 0);

CONCLAVE_KERNEL_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Adds columns [begin, end): sums[r][v] += x[r][k] * w[k][v]. `scale` is used for plain rows only.
template <int kRows, bool kPlain>
CONCLAVE_KERNEL_INLINE void add_products(const E4m3PanelTask& task, const float* values,
                                         int64_t begin, int64_t end, const float* scale,
                                         int64_t lane, Vec (&sums)[kRows][kVecs]) {
  for (int64_t k = begin; k < end; ++k) {
    const std::byte* codes = task.panel + k * kE4m3PanelRows + lane;
    for (int v = 0; v < kVecs; ++v) {
      Vec weight = Vec::load_e4m3(codes + v * Vec::kLanes);
      if constexpr (kPlain) weight = Vec::mul(weight, Vec::load(scale + v * Vec::kLanes));
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = Vec::fma(Vec::broadcast(values[r * task.stride + k]), weight, sums[r][v]);
      }
    }
  }
}

template <int kRows, bool kPlain>
CONCLAVE_KERNEL_INLINE void product_of_rows(const E4m3PanelTask& task, int64_t row, int64_t lane) {
  const float* values = task.values + row * task.stride;
  const float* steps = kPlain ? nullptr : task.scales + row * task.stride;
  const int64_t cols = task.layout.cols;
  const int64_t group_width = task.layout.group_width;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = Vec::zero();
  }
  for (int64_t begin = 0; begin < cols;) {
    const int64_t group = begin / group_width;
    int64_t end = lesser(cols, (group + 1) * group_width);
    const float* scale = task.panel_scales + group * kE4m3PanelRows + lane;
    if constexpr (kPlain) {
      add_products<kRows, true>(task, values, begin, end, scale, lane, sums);
    } else {
      const int64_t step = begin / task.scale_width;
      end = lesser(end, (step + 1) * task.scale_width);
      Vec partial[kRows][kVecs];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) partial[r][v] = Vec::zero();
      }
      add_products<kRows, false>(task, values, begin, end, scale, lane, partial);
      for (int r = 0; r < kRows; ++r) {
        const Vec of_row = Vec::broadcast(steps[r * task.stride + step]);
        for (int v = 0; v < kVecs; ++v) {
          const Vec scaled =
              Vec::mul(Vec::mul(partial[r][v], of_row), Vec::load(scale + v * Vec::kLanes));
          sums[r][v] = Vec::add(sums[r][v], scaled);
        }
      }
    }
    begin = end;
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = task.out + (row + r) * kE4m3PanelRows + lane;
    for (int v = 0; v < kVecs; ++v) {
      Vec::add(sums[r][v], Vec::load(task.panel_biases + lane + v * Vec::kLanes))
          .store(out + v * Vec::kLanes);
    }
  }
}

template <bool kPlain>
CONCLAVE_KERNEL_INLINE void product_of_all(const E4m3PanelTask& task, int64_t lane) {
  int64_t row = 0;
  for (; row + kMostRows <= task.num_rows; row += kMostRows) {
    product_of_rows<kMostRows, kPlain>(task, row, lane);
  }
  for (; row + 2 <= task.num_rows; row += 2) product_of_rows<2, kPlain>(task, row, lane);
  if (row < task.num_rows) product_of_rows<1, kPlain>(task, row, lane);
}

CONCLAVE_KERNEL_INLINE void e4m3_product(const E4m3PanelTask& task) {
  for (int64_t lane = 0; lane < kE4m3PanelRows; lane += kLanesTogether) {
    if (task.scales == nullptr) {
      product_of_all<true>(task, lane);
    } else {
      product_of_all<false>(task, lane);
    }
  }
}

}  // namespace conclave::inline v0::experts::CONCLAVE_ISA_NAMESPACE
