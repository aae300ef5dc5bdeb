// Groups of 16 rows times one packed bf16 panel, on tile registers.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/tiles-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Accumulator tiles as memory: [tile][row][column].
struct alignas(64) TileSums {
  float value[4][kTileRows][16];
};

// One group: all 64 columns in one pass, four accumulators per activation tile.
template <class Epilogue>
CONCLAVE_KERNEL_INLINE void compute_one_group(const PanelTask& task, int64_t group,
                                              int64_t num_rows, Ahead& ahead) {
  const std::byte* x = task.rows + group * kTileRows * task.row_bytes;
  const std::byte* w = task.panel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < task.k; k += kTileK, x += kTileBytes, w += 16 * kPanelRowBytes) {
    ahead.turn();
    _tile_loadd(4, x, kTileRowBytes);
    _tile_loadd(6, w, kPanelRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, kPanelRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 128, kPanelRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 192, kPanelRowBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  TileSums sums;
  _tile_stored(0, sums.value[0], kTileRowBytes);
  _tile_stored(1, sums.value[1], kTileRowBytes);
  _tile_stored(2, sums.value[2], kTileRowBytes);
  _tile_stored(3, sums.value[3], kTileRowBytes);
  std::byte* out = task.out + group * kTileRows * task.out_row_bytes;
  Epilogue::store(sums.value[0], sums.value[2], num_rows, 0, task, out);
  Epilogue::store(sums.value[1], sums.value[3], num_rows, 16, task, out);
}

// Two groups: 16 columns of each half of the panel per pass, so that gate and up meet.
template <class Epilogue>
CONCLAVE_KERNEL_INLINE void compute_two_groups(const PanelTask& task, int64_t group,
                                               int64_t num_rows, Ahead& ahead) {
  const int64_t group_bytes = kTileRows * task.row_bytes;
  for (int64_t column = 0; column < 32; column += 16) {
    const std::byte* x = task.rows + group * group_bytes;
    const std::byte* w = task.panel + column * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < task.k; k += kTileK, x += kTileBytes, w += 16 * kPanelRowBytes) {
      ahead.turn();
      _tile_loadd(4, x, kTileRowBytes);
      _tile_loadd(6, w, kPanelRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 128, kPanelRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x + group_bytes, kTileRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    TileSums sums;
    _tile_stored(0, sums.value[0], kTileRowBytes);
    _tile_stored(1, sums.value[1], kTileRowBytes);
    _tile_stored(2, sums.value[2], kTileRowBytes);
    _tile_stored(3, sums.value[3], kTileRowBytes);
    std::byte* out = task.out + group * kTileRows * task.out_row_bytes;
    Epilogue::store(sums.value[0], sums.value[1], kTileRows, column, task, out);
    Epilogue::store(sums.value[2], sums.value[3], num_rows - kTileRows, column, task,
                    out + kTileRows * task.out_row_bytes);
  }
}

// A PanelFunction; rows come in groups (tiles-inl.h), without an index. Groups are taken in pairs.
template <class Epilogue>
void compute_panel_on_tiles(const PanelTask& task) noexcept {
  const int64_t steps = (task.k + kTileK - 1) / kTileK;
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  Ahead ahead(task.next_panel, steps * 16 * kPanelRowBytes, steps * groups);
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
      compute_one_group<Epilogue>(task, row / kTileRows, first, ahead);
    } else {
      compute_two_groups<Epilogue>(task, row / kTileRows, first + second, ahead);
    }
  }
  _tile_release();
}

// Writes columns [column, column + 16) and the 16 columns 32 further as float32.
struct StoreTiles {
  static CONCLAVE_KERNEL_INLINE void store(const float (&low)[kTileRows][16],
                                           const float (&high)[kTileRows][16], int64_t num_rows,
                                           int64_t column, const PanelTask& task, std::byte* out) {
    store_half(low, num_rows, column, task, out);
    store_half(high, num_rows, column + 32, task, out);
  }

 private:
  static CONCLAVE_KERNEL_INLINE void store_half(const float (&sums)[kTileRows][16],
                                                int64_t num_rows, int64_t column,
                                                const PanelTask& task, std::byte* out) {
    const int64_t valid = task.valid_columns - column;
    if (valid <= 0) return;
    const int64_t count = valid < Vec::kLanes ? valid : Vec::kLanes;
    for (int64_t r = 0; r < num_rows; ++r) {
      Vec::load(sums[r]).store_first(out + r * task.out_row_bytes + column * 4, count);
    }
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
