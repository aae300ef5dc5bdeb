// The order of a block's items: tiles of the up product, then parts of the down product.
#pragma once

#include "experts/cuda/sm90/decode/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// A block takes tiles of the up product, then its columns of the down product for all parts (unit,
// slice). Half of the tiles, or a quarter if there are many, are assigned beforehand. Free blocks
// draw the others, since not all multiprocessors are equally near to memory; a draw costs a trip to
// the counter, which few tiles do not hide: these are all assigned.
struct Walk {
  static constexpr int kManyTiles = 16;  // per block
  int total_tiles = 0;
  int own_tiles = 0;
  int first_own = 0;
  int own_step = 1;
  int num_parts = 0;
  int first_row = 0;  // the block's first output column

  __device__ Walk(const DecodeParams& params, int units) {
    const DecodePlan& plan = params.plan;
    total_tiles = units * plan.feature_tiles;
    const int share = total_tiles / static_cast<int>(gridDim.x);
    own_tiles = max(share < kManyTiles ? share / 2 : share / 4, plan.tiles_ahead);
    if (share <= plan.few_tiles) own_tiles = share + 1;
    const bool in_turns = share <= plan.few_tiles || plan.has_lanes;
    const int block = static_cast<int>(blockIdx.x);
    first_own = in_turns ? block : block * own_tiles;
    own_step = in_turns ? static_cast<int>(gridDim.x) : 1;
    first_row = static_cast<int>(blockIdx.x) * plan.passes * plan.pass_rows;
    if (first_row < plan.hidden_size) num_parts = units * plan.k_slices;
  }
  // The block's i-th tile of its own. That and those that are drawn may be total_tiles or more,
  // which says that none is left.
  __device__ __forceinline__ int own_tile(int i) const { return first_own + i * own_step; }
  __device__ __forceinline__ int first_drawn() const {
    return own_tiles * static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ bool draws() const { return first_drawn() < total_tiles; }
};

inline constexpr int kNoItem = -1;
inline constexpr int kItemUnknown = -2;

// A tile of the up product and its unit, in a word that is no smaller than 0.
struct UpItem {
  int unit;
  int tile;
};
inline constexpr int kTileBits = 22;  // rows of the intermediate are no wider than 2^24
__device__ __forceinline__ UpItem up_item(int word) {
  return {word >> kTileBits, word & ((1 << kTileBits) - 1)};
}
__device__ __forceinline__ int item_of(const DecodePlan& plan, int total_tiles, int tile) {
  if (tile >= total_tiles) return kNoItem;
  const int unit = tile / plan.feature_tiles;
  return unit << kTileBits | (tile - unit * plan.feature_tiles);
}

__device__ __forceinline__ void tell_item(DecodeTables& tables, int i, int item) {
  volatile int32_t* slot = &tables.tiles[i % kDecodeTileSlots];
  *slot = item;
}

// Waits until the block's i-th item is told. compute-sanitizer's racecheck reports
// this polling of a word that another warp writes without a barrier. It is safe: the word is
// aligned and complete in itself, a barrier has published the tables that it refers to, and a slot
// is not reused before the ring has come round.
__device__ __forceinline__ int await_item(const DecodeTables& tables, int i) {
  const volatile int32_t* slot = &tables.tiles[i % kDecodeTileSlots];
  int tile = *slot;
  while (tile == kItemUnknown) tile = *slot;
  return tile;
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

// Draws the tiles that are not the block's own, as the producer comes near to them. One draw is
// under way at a time, and takes as many tiles as have come near meanwhile.
__device__ __forceinline__ void draw_tiles(const DecodeParams& params, DecodeTables& tables,
                                           const Walk& walk) {
  if (!walk.draws()) return;
  const volatile int32_t* const begun = &tables.begun;
  for (int told = walk.own_tiles;;) {
    int count = 0;
    for (; count <= 0; count = *begun + params.plan.tiles_ahead - told) __nanosleep(20);
    const uint32_t drawn =
        atomicAdd(params.call.counters + kNextTileWord, static_cast<uint32_t>(count));
    for (int tile = walk.first_drawn() + static_cast<int>(drawn); count > 0; --count, ++tile) {
      const int item = item_of(params.plan, walk.total_tiles, tile);
      tell_item(tables, told++, item);
      if (item == kNoItem) return;
    }
  }
}

// Calls visit(item) for the block's tiles of the up product, as they are told.
template <class Visit>
__device__ __forceinline__ void for_each_up_item(const DecodeParams& params, const Shared& shared,
                                                 const Visit& visit) {
  for (int i = 0;; ++i) {
    const int item = await_item(*shared.tables, i);
    if (item == kNoItem) return;
    visit(up_item(item));
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
