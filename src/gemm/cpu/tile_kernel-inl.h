// Groups of 16 rows times one packed bf16 panel, on tile registers.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/tiles-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The sums of one group of rows. Accumulators are stored side by side.
struct alignas(64) GroupSums {
  float value[kTileRows][64];
};

CONCLAVE_KERNEL_INLINE void finish_group(const PanelTask& task, int64_t group, int64_t num_rows,
                                         GroupSums& sums) {
  // Activated rows form a group again; float32 rows stand alone, and those that become codes do.
  const bool grouped = task.epilogue != nullptr && task.row_scales.first == nullptr;
  finish_tile(task, {.sums = sums.value[0],
                     .num_rows = num_rows,
                     .out = task.out + group * kTileRows * task.out_row_bytes,
                     .out_row_bytes = grouped ? kTileRowBytes : task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

// Computes one group: all 64 columns in one pass, with four accumulators per activation tile.
CONCLAVE_KERNEL_INLINE void compute_one_group(const PanelTask& task, int64_t group,
                                              int64_t num_rows, Ahead& ahead) {
  const std::byte* x = task.rows + group * kTileRows * task.row_bytes;
  const std::byte* w = task.panel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < task.k; k += kTileK, x += kTileBytes, w += 16 * kPairRowBytes) {
    ahead.turn();
    _tile_loadd(4, x, kTileRowBytes);
    _tile_loadd(6, w, kPairRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, kPairRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 128, kPairRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 192, kPairRowBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  GroupSums sums;
  _tile_stored(0, sums.value[0], kSumRowBytes);
  _tile_stored(1, sums.value[0] + 16, kSumRowBytes);
  _tile_stored(2, sums.value[0] + 32, kSumRowBytes);
  _tile_stored(3, sums.value[0] + 48, kSumRowBytes);
  finish_group(task, group, num_rows, sums);
}

// Computes two groups: 16 columns of each half of the panel per pass, so that four accumulators
// serve both.
CONCLAVE_KERNEL_INLINE void compute_two_groups(const PanelTask& task, int64_t group,
                                               int64_t num_rows, Ahead& ahead) {
  const int64_t group_bytes = kTileRows * task.row_bytes;
  GroupSums first;
  GroupSums second;
  for (int64_t column = 0; column < 32; column += 16) {
    const std::byte* x = task.rows + group * group_bytes;
    const std::byte* w = task.panel + column * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < task.k; k += kTileK, x += kTileBytes, w += 16 * kPairRowBytes) {
      ahead.turn();
      _tile_loadd(4, x, kTileRowBytes);
      _tile_loadd(6, w, kPairRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 128, kPairRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x + group_bytes, kTileRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, first.value[0] + column, kSumRowBytes);
    _tile_stored(1, first.value[0] + column + 32, kSumRowBytes);
    _tile_stored(2, second.value[0] + column, kSumRowBytes);
    _tile_stored(3, second.value[0] + column + 32, kSumRowBytes);
  }
  finish_group(task, group, kTileRows, first);
  finish_group(task, group + 1, num_rows - kTileRows, second);
}

// A PanelFunction; rows come in groups (tiles-inl.h), without an index. Groups are taken in pairs.
inline void compute_panel_on_tiles(const PanelTask& task) noexcept {
  const int64_t steps = (task.k + kTileK - 1) / kTileK;
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  Ahead ahead(task.next_panel, steps * 16 * kPairRowBytes, steps * groups);
  int configured_first = 0;
  int configured_second = 0;
  for (int64_t row = 0; row < task.num_rows; row += 2 * kTileRows) {
    const int64_t rest = task.num_rows - row;
    const int first = static_cast<int>(rest < kTileRows ? rest : kTileRows);
    const int64_t beyond = rest - first;
    const int second = static_cast<int>(beyond < kTileRows ? beyond : kTileRows);
    if (first != configured_first || second != configured_second) {
      configure_tiles(first, second);
      configured_first = first;
      configured_second = second;
    }
    if (second == 0) {
      compute_one_group(task, row / kTileRows, first, ahead);
    } else {
      compute_two_groups(task, row / kTileRows, first + second, ahead);
    }
  }
  _tile_release();
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
