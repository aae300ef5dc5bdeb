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

// Rows that a group of a task has.
CONCLAVE_KERNEL_INLINE int64_t rows_of_group(const PanelTask& task, int64_t group) {
  const int64_t rest = task.num_rows - group * kTileRows;
  return rest < kTileRows ? rest : kTileRows;
}

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

// Values of k between two groups: their 32 KiB of the panel stay in the first-level cache, so that
// all groups but the first load weights from there, and activations from the second-level one.
inline constexpr int64_t kTileStripK = 256;
// Groups that share such weights, whose sums wait in the second-level cache meanwhile.
inline constexpr int64_t kMaxTileGroups = 16;

// Adds k of [begin, end) of one group: all 64 columns, with four accumulators per activation tile.
CONCLAVE_KERNEL_INLINE void add_strip(const PanelTask& task, int64_t group, int64_t begin,
                                      int64_t end, Ahead& ahead, GroupSums& sums) {
  const std::byte* x = task.rows + group * kTileRows * task.row_bytes + begin * kTileRowBytes / 2;
  const std::byte* w = task.panel + begin / 2 * kPairRowBytes;
  if (begin == 0) {
    clear_sums();
  } else {
    load_sums(sums.value[0]);
  }
  for (int64_t k = begin; k < end; k += kTileK, x += kTileBytes, w += 16 * kPairRowBytes) {
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
  store_sums(sums.value[0]);
}

// Groups [first, first + count), at most kMaxTileGroups, of which the last may have fewer rows.
inline void compute_groups(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  GroupSums sums[kMaxTileGroups];
  int64_t configured = 0;
  // Without any k, sums are zeros.
  int64_t begin = 0;
  do {
    const int64_t rest = task.k - begin;
    const int64_t end = begin + (rest < kTileStripK ? rest : kTileStripK);
    for (int64_t g = 0; g < count; ++g) {
      const int64_t rows = rows_of_group(task, first + g);
      if (rows != configured) {
        configured = rows;
        configure_tiles(static_cast<int>(rows));
      }
      add_strip(task, first + g, begin, end, ahead, sums[g]);
    }
    begin = end;
  } while (begin < task.k);
  for (int64_t g = 0; g < count; ++g) {
    finish_group(task, first + g, rows_of_group(task, first + g), sums[g]);
  }
}

// A PanelFunction; rows come in groups (tiles-inl.h), without an index.
inline void compute_panel_on_tiles(const PanelTask& task) noexcept {
  const int64_t steps = (task.k + kTileK - 1) / kTileK;
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  Ahead ahead =
      Ahead::along(task.panel, task.next_panel, steps * 16 * kPairRowBytes, steps * groups);
  for (int64_t first = 0; first < groups; first += kMaxTileGroups) {
    const int64_t rest = groups - first;
    compute_groups(task, first, rest < kMaxTileGroups ? rest : kMaxTileGroups, ahead);
  }
  if (groups > 0) _tile_release();
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
