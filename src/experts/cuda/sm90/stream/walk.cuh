// The order in which blocks take items, and how a block's warps are told of them.
#pragma once

#include "cuda/device/barrier.cuh"
#include "experts/cuda/sm90/stream/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Cuts an expert's rows into nearly equal tiles, in steps of 8, instead of full tiles and a rest.
__device__ __forceinline__ void cut_evenly(const Params& params, TokenTile& tile) {
  const int32_t begin = __ldcg(params.expert_begin + tile.expert);
  const int32_t rows = __ldcg(params.expert_begin + tile.expert + 1) - begin;
  const int32_t tiles = (rows + params.tile_tokens - 1) / params.tile_tokens;
  const int32_t share = ((rows + tiles - 1) / tiles + 7) / 8 * 8;
  const int32_t first = (tile.begin - begin) / params.tile_tokens * share;
  tile.begin = begin + first;
  tile.count = min(share, rows - first);
}

// Token tiles that are walked together.
inline constexpr int32_t kTilesOfGroup = 4;

// Tells a block's warps item number `order`.
template <class Config>
__device__ __forceinline__ void tell_item(SharedStorage<Config>& shared, uint32_t order,
                                          const Item& item) {
  const uint32_t slot = order % Config::kItems;
  shared.items[slot] = item;
  ptx::mbarrier_arrive(&shared.item_full[slot]);
}

// Item number `order`, of which this warp has been told.
template <class Config>
__device__ __forceinline__ const Item& told_item(const SharedStorage<Config>& shared,
                                                 uint32_t order) {
  return shared.items[order % Config::kItems];
}
// Waits for item number `order`; one without rows says that none is left.
template <class Config>
__device__ __forceinline__ Item await_item(SharedStorage<Config>& shared, uint32_t order) {
  ptx::mbarrier_wait(&shared.item_full[order % Config::kItems], order / Config::kItems % 2);
  return told_item(shared, order);
}

// Calls run<N>() with the narrowest width of a product that holds `count` rows.
template <class Config, int kWidth = 0, class Run>
__device__ __forceinline__ void with_width(int32_t count, const Run& run) {
  constexpr Widths kWidths = Config::kWidths;
  if constexpr (kWidth + 1 < kWidths.count) {
    if (count > kWidths.of[kWidth]) {
      with_width<Config, kWidth + 1>(count, run);
      return;
    }
  }
  run.template operator()<kWidths.of[kWidth]>();
}

// The order in which items are drawn: by groups of token tiles; within a group, all token
// tiles of a feature tile, then the next feature tile. Tiles of one expert thus read their weights
// at the same time, and from memory once.
template <class Config>
struct Walk {
  const Params& params;
  int32_t num_tiles = 0;
  int32_t items = 0;

  // Loads bypass L1, here and below: the down product reads this before its wait, when all blocks
  // of the up product have waited for the grouping.
  __device__ __forceinline__ explicit Walk(const Params& p)
      : params(p), num_tiles(__ldcg(p.num_tiles)), items(num_tiles * p.feature_tiles) {}

  __device__ __forceinline__ Item at(int32_t index) const {
    Item item;
    if (index >= items) return item;
    const int32_t first = index / (kTilesOfGroup * params.feature_tiles) * kTilesOfGroup;
    const int32_t width = min(kTilesOfGroup, num_tiles - first);
    const int32_t within = index - first * params.feature_tiles;
    item.feature_tile = within / width;
    const int32_t at = first + within - item.feature_tile * width;
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(params.tiles) + at);
    item.tile = {.expert = tile.x, .begin = tile.y, .count = tile.z};
    item.tile_index = at;
    if constexpr (Config::kCutsEvenly) cut_evenly(params, item.tile);
    return item;
  }
};

}  // namespace conclave::inline v0::experts::stream
