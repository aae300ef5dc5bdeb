// Few rows times one packed panel of bf16, on vectors, in the order of tiles (tile_order-inl.h).
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/segments-inl.h"
#include "gemm/cpu/tile_groups-inl.h"
#include "gemm/cpu/tile_order-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

CONCLAVE_KERNEL_INLINE EvenAndOdd load_pairs(const std::byte* pairs) {
  EvenAndOdd wide;
#pragma GCC unroll 4
  for (int j = 0; j < kPairVectors; ++j) {
    const Vec both = Vec::load(pairs + j * Vec::kLanes * 4);
    wide.even[j] = both.bf16_first();
    wide.odd[j] = both.bf16_second();
  }
  return wide;
}

// Adds tiles [first, first + count) of a panel, whose values of the rows are there.
template <int kRows>
void add_wide_tiles(const PanelTask& task, const WideValues<kRows>& values, int64_t first,
                    int64_t count, const AlongPanel& along, GroupSums& sums) {
  const SubnormalsAsZeros subnormals;
  Tile<kRows, kPairVectors> totals;
  load_wide<kRows>(sums.value, totals);
  for (int64_t tile = 0; tile < count; ++tile) {
    const int64_t at = (first + tile) * kTilePairs * kPairRowBytes;
    const std::byte* const panel = task.panel + at;
    const std::byte* const fetched = along.fetched(at + kTilePairs * kPairRowBytes) + at;
    WideChains<kRows> chains(values);
    for (int64_t pair = 0; pair < kTilePairs; ++pair) {
      const EvenAndOdd weights = load_pairs(panel + pair * kPairRowBytes);
      prefetch_lines<kPairRowBytes>(fetched + pair * kPairRowBytes);
      chains.add_even(tile * kTilePairs + pair, weights);
      chains.add_odd(tile * kTilePairs + pair, weights);
    }
    chains.add_to(totals);
  }
  store_wide<kRows>(totals, sums.value);
}

// Computes all rows of a task that has few; they come in one group.
struct ComputeWidePanel {
  const PanelTask& task;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    compute<kRows>(task);
  }

 private:
  template <int kRows>
  static void compute(const PanelTask& task) {
    const int64_t tiles = (task.k + kTileK - 1) / kTileK;
    const AlongPanel along(task.panel, task.next_panel, tiles * kTilePairs * kPairRowBytes);
    GroupSums sums;
    for (int r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(sums.value[r] + c);
    }
    WideValues<kRows> values;
    for (int64_t first = 0; first < tiles; first += values.kTiles) {
      const int64_t count = lesser(values.kTiles, tiles - first);
      for (int r = 0; r < kRows; ++r) {
        values.widen(r, task.rows + first * kTileBytes + r * kTileRowBytes, kTileBytes, count);
      }
      add_wide_tiles<kRows>(task, values, first, count, along, sums);
    }
    finish_group(task, 0, kRows, sums);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
