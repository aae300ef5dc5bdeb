// Rows of int8 codes times one packed panel of codes whose values are whole numbers, on tile
// registers: the arithmetic and the bits of integer_kernel-inl.h, which few rows take.
//
// Strips of interleaved weights lie as tiles want them. A tile takes 64 k at once, from a multiple
// of 64 on; where a segment begins or ends among them, the weights of others are zeros.
#pragma once

#include "gemm/cpu/integer_strips-inl.h"
#include "gemm/cpu/tiles-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Adds 64 k of up to 16 rows: signed codes times 16 unsigned quads.
CONCLAVE_KERNEL_INLINE void add_byte_tile(const TileOfRows& rows, const int32_t (*quads)[64]) {
  settle_memory();
  _tile_loadd(4, rows.first, rows.stride);
  _tile_loadd(6, quads[0], kPairRowBytes);
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(7, quads[0] + 16, kPairRowBytes);
  _tile_dpbsud(1, 4, 7);
  _tile_loadd(6, quads[0] + 32, kPairRowBytes);
  _tile_dpbsud(2, 4, 6);
  _tile_loadd(7, quads[0] + 48, kPairRowBytes);
  _tile_dpbsud(3, 4, 7);
}

// A multiplier of StripRows.
class TileMultiplier {
 public:
  static constexpr int kRows = kTileRows;
  static constexpr int64_t kStepK = 64;

  template <class Strip>
  CONCLAVE_KERNEL_INLINE void add_strip(const PanelTask& task, const Strip& strip,
                                        const StripRange& range, IntegerGroup<kRows>& group) {
    if (group.num_rows != configured_) {
      configured_ = group.num_rows;
      configure_tiles(configured_);
    }
    if (range.begins) {
      clear_sums();
    } else {
      load_sums(group.partial);
    }
    for (int64_t k = range.begin; k < range.end; k += kStepK) {
      add_byte_tile(take_rows(task, group, k), strip.quads + (k - range.begin) / 4);
    }
    store_sums(group.partial);
  }

 private:
  // Rows that lie anywhere are brought together; tiles load others where they are.
  CONCLAVE_KERNEL_INLINE TileOfRows take_rows(const PanelTask& task,
                                              const IntegerGroup<kRows>& group, int64_t k) {
    if (task.row_index == nullptr) return {group.codes[0] + k, task.row_bytes};
    return gathered_.gather(group.codes, group.num_rows, k);
  }

  GatheredTiles gathered_;
  int configured_ = 0;
};

// A PanelFunction for rows of codes. Up to the rows of one tile of vectors, these interleave the
// weights once as a strip does, but keep them in registers.
template <class Format>
struct IntegerPanelOnTiles {
  static void compute(const PanelTask& task) noexcept {
    if (task.num_rows <= kMaxIntegerTileRows) return IntegerPanel<Format>::compute(task);
    TileMultiplier multiplier;
    compute_by_strips<WholeWeights<Format>>(task, multiplier);
    _tile_release();
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
