// The order of a block's items: tiles of the up product, then parts of the down product.
#pragma once

#include "experts/cuda/sm90/decode/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// A block takes tiles of the up product, then its columns of the down product for all parts (unit,
// slice). Half of the tiles, or a quarter if there are many, are assigned beforehand. Free blocks
// draw the others, since not all multiprocessors are equally near to memory; a draw costs a trip to
// the counter, which few tiles do not hide.
struct Walk {
  static constexpr int kManyTiles = 16;  // per block
  int total_tiles = 0;
  int own_tiles = 0;
  int num_parts = 0;
  int first_row = 0;  // the block's first output column
  uint32_t* next_tile = nullptr;

  __device__ Walk(const DecodeParams& params, int units) {
    const DecodePlan& plan = params.plan;
    total_tiles = units * plan.feature_tiles;
    const int share = total_tiles / static_cast<int>(gridDim.x);
    own_tiles = share < kManyTiles ? share / 2 : share / 4;
    first_row = static_cast<int>(blockIdx.x) * plan.passes * plan.pass_rows;
    if (first_row < plan.hidden_size) num_parts = units * plan.k_slices;
    next_tile = params.call.counters + kNextTileWord;
  }
  // The block's i-th tile, or total_tiles or more if none is left. Call it once for each i.
  __device__ __forceinline__ int take(int i) const {
    if (i < own_tiles) return static_cast<int>(blockIdx.x) * own_tiles + i;
    return static_cast<int>(gridDim.x) * own_tiles + static_cast<int>(atomicAdd(next_tile, 1U));
  }
};

inline constexpr int kNoItem = -1;
inline constexpr int kItemUnknown = -2;

// Waits until the producer tells the block's i-th tile. compute-sanitizer's racecheck reports
// this polling of a word that another warp writes without a barrier. It is safe: the word is
// aligned and complete in itself, a barrier has published the tables that it refers to, and a slot
// is not reused before the ring has come round.
__device__ __forceinline__ int await_item(const DecodeTables& tables, int i) {
  const volatile int32_t* slot = &tables.tiles[i % kDecodeTileSlots];
  int tile = *slot;
  while (tile == kItemUnknown) tile = *slot;
  return tile;
}

struct UpItem {
  int unit;
  int tile;
};
__device__ __forceinline__ UpItem up_item(const DecodePlan& plan, int tile) {
  const int unit = tile / plan.feature_tiles;
  return {unit, tile - unit * plan.feature_tiles};
}

struct DownItem {
  int unit;
  int slice;
  int begin;  // boxes
  int end;
};
__device__ __forceinline__ DownItem down_item(const DecodePlan& plan, int index) {
  const int unit = index / plan.k_slices;
  const int slice = index - unit * plan.k_slices;
  const int begin = plan.slice_boxes * slice;
  return {unit, slice, begin, min(begin + plan.slice_boxes, plan.down_boxes)};
}

__device__ __forceinline__ DownItem next_item(const DecodePlan& plan, const DownItem& part) {
  const bool same = part.end < plan.down_boxes;
  const int begin = same ? part.end : 0;
  return {same ? part.unit : part.unit + 1, same ? part.slice + 1 : 0, begin,
          min(begin + plan.slice_boxes, plan.down_boxes)};
}

// The first group of columns of a box that has factors of its own.
__device__ __forceinline__ int group_of_box(const DecodePlan& plan, const DecodeFactors& factors,
                                            int box) {
  if (factors.groups > 1) return box * factors.groups;
  return factors.columns == 0 ? 0 : box * plan.box_columns / factors.columns;
}

// Calls visit(item) for the block's tiles of the up product, as the producer tells them.
template <class Visit>
__device__ __forceinline__ void for_each_up_item(const DecodeParams& params, const Shared& shared,
                                                 const Visit& visit) {
  for (int i = 0;; ++i) {
    const int tile = await_item(*shared.tables, i);
    if (tile == kNoItem) return;
    visit(up_item(params.plan, tile));
  }
}

// Calls visit(part, row) for the block's passes over the parts of the down product; `row` is a
// pass's first.
template <class Visit>
__device__ __forceinline__ void for_each_down_item(const DecodeParams& params, const Walk& walk,
                                                   const Visit& visit) {
  const DecodePlan& plan = params.plan;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int row = walk.first_row + pass * plan.pass_rows;
    if (row >= plan.hidden_size) return;
    DownItem part = down_item(plan, 0);
    for (int i = 0; i < walk.num_parts; ++i, part = next_item(plan, part)) visit(part, row);
  }
}

}  // namespace conclave::inline v0::experts::decode
