// Subtracts the weights' offsets from finished sums: for each segment, the offset times the row's
// scale and the sum of its codes. That is little work beside the products, and keeps offsets out of
// the kernels of codes.
#pragma once

#include "gemm/cpu/group_numbers-inl.h"
#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows whose sums stay in registers, beside a slice of columns.
inline constexpr int kOffsetRows = Vec::kLanes == 16 ? 4 : 2;
inline constexpr int kOffsetVectors = 4;

// Rows tile.first_row + row + [0, kRows) of the task.
template <int kRows>
CONCLAVE_KERNEL_INLINE void take_offsets_of(const PanelTask& task, const FinishedTile& tile,
                                            int64_t row) {
  const float* scales[kRows];
  const int32_t* codes[kRows];  // sums of them
  for (int r = 0; r < kRows; ++r) {
    const int64_t slot = tile.first_row + row + r;
    const int64_t place = task.row_index != nullptr ? task.row_index[slot] : slot;
    scales[r] = task.row_scales.of_row(place, task.row_bytes);
    codes[r] = task.row_scales.sums_of_row(place, task.row_bytes);
  }
  const WeightGroups groups{.k = task.k, .width = task.scale_width, .skip = task.scale_skip};
  for (int column = 0; column < 64; column += kOffsetVectors * Vec::kLanes) {
    float* const sums = tile.sums + row * 64 + column;
    Vec total[kRows][kOffsetVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kOffsetVectors; ++j) {
        total[r][j] = Vec::load(sums + r * 64 + j * Vec::kLanes);
      }
    }
    for (SegmentWalk walk(groups, task.row_scales); !walk.done(); walk.next()) {
      alignas(64) float room[64];
      const float* const offsets = numbers_of(task.offsets, walk.weights_group(), room) + column;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto sum = static_cast<float>(codes[r][walk.segment()]);
        const Vec shift = Vec::broadcast(-(scales[r][walk.rows_group()] * sum));
#pragma GCC unroll 4
        for (int j = 0; j < kOffsetVectors; ++j) {
          total[r][j] = Vec::fma(shift, Vec::load(offsets + j * Vec::kLanes), total[r][j]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kOffsetVectors; ++j) {
        total[r][j].store(sums + r * 64 + j * Vec::kLanes);
      }
    }
  }
}

inline void take_offsets(const PanelTask& task, const FinishedTile& tile) {
  int64_t row = 0;
  for (; row + kOffsetRows <= tile.num_rows; row += kOffsetRows) {
    take_offsets_of<kOffsetRows>(task, tile, row);
  }
  for (; row < tile.num_rows; ++row) take_offsets_of<1>(task, tile, row);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
