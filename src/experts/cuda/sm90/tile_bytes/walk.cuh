// The order of items: one warp finds those of its block, one ahead of the warp that loads them.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "experts/cuda/common/ticket_counter.cuh"
#include "experts/cuda/sm90/tile_bytes/config.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// A block's part of an item of its cluster. If one block can hold all rows of the token tile, the
// blocks divide the weight rows instead.
template <class Config>
__device__ __forceinline__ Item item_of(const Params& params, const TokenTile& tile,
                                        int32_t tile_index, int32_t part, int32_t rank) {
  if (tile.count > Config::kTokens) {
    return {.expert = tile.expert,
            .begin = tile.begin + rank * Config::kTokens,
            .count = rank == 0 ? Config::kTokens : tile.count - Config::kTokens,
            .feature_tile = part,
            .tile_index = tile_index,
            .shares_weights = true};
  }
  const int32_t feature_tile = part * Config::kCluster + rank;
  return {.expert = tile.expert,
          .begin = tile.begin,
          .count = feature_tile < params.feature_tiles ? tile.count : 0,
          .feature_tile = feature_tile,
          .tile_index = tile_index};
}

// Finds the items of clusters by number; numbers must not decrease. Lane i of the warp knows token
// tile first + i. Token tiles of an expert that both blocks share are walked in groups of up to
// params.group_tiles: all tiles of a group take a part of the weights before the next part's turn,
// so that weights which L2 cannot keep from one tile to the next are read once a group.
template <class Config>
struct Walk {
  int32_t tiles = 0;
  int32_t first = -32;
  int32_t end_of_lane = 0;  // number of items of all tiles up to this lane's
  int32_t end = 0;          // number of items of all tiles up to lane 31's
  // 64 times the lane of the first tile of this lane's group, plus the number of its tiles.
  int32_t group = 0;

  // True if there is an item of this number.
  __device__ __forceinline__ bool find(const Params& params, int32_t number, int32_t rank,
                                       Item& item) {
    while (number >= end) {
      first += 32;
      if (first >= tiles) return false;
      count_items(params);
    }
    const uint32_t ends_after = __ballot_sync(0xffffffffu, end_of_lane > number);
    int32_t lane = __ffs(static_cast<int>(ends_after)) - 1;
    const int32_t of_group = __shfl_sync(0xffffffffu, group, lane);
    const int32_t left = __shfl_sync(0xffffffffu, end_of_lane, lane) - number;  // in the tile
    int32_t part = items_of(params, tile_at(params, first + lane).count) - left;
    const int32_t members = of_group % 64;
    if (members > 1) {  // each has an item for every feature tile
      const int32_t place = (lane - of_group / 64) * params.feature_tiles + part;
      lane = of_group / 64 + place % members;
      part = place / members;
    }
    item = item_of<Config>(params, tile_at(params, first + lane), first + lane, part, rank);
    return true;
  }

 private:
  // The load bypasses L1, which may hold the tiles of an earlier call until the wait.
  static __device__ __forceinline__ TokenTile tile_at(const Params& params, int32_t index) {
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(params.tiles) + index);
    return {.expert = tile.x, .begin = tile.y, .count = tile.z};
  }
  static __device__ __forceinline__ int32_t items_of(const Params& params, int32_t count) {
    return count > Config::kTokens
               ? params.feature_tiles
               : (params.feature_tiles + Config::kCluster - 1) / Config::kCluster;
  }
  __device__ __forceinline__ void count_items(const Params& params) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const bool exists = first + lane < tiles;
    const TokenTile tile = exists ? tile_at(params, first + lane) : TokenTile{.expert = -1};
    if (params.group_tiles > 1) find_group(params, tile, lane);
    int32_t items = exists ? items_of(params, tile.count) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, items, distance);
      if (lane >= distance) items += before;
    }
    end_of_lane = end + items;
    end = __shfl_sync(0xffffffffu, end_of_lane, 31);
  }
  // A group ends with its expert, and with the 32 tiles. Only the last tile of an expert has too
  // few rows to be shared.
  __device__ __forceinline__ void find_group(const Params& params, const TokenTile& tile,
                                             int32_t lane) {
    const uint32_t same = __match_any_sync(0xffffffffu, tile.expert);
    const uint32_t shared = same & __ballot_sync(0xffffffffu, tile.count > Config::kTokens);
    const int32_t first_lane = __ffs(static_cast<int>(same)) - 1;
    const int32_t begin =
        first_lane + (lane - first_lane) / params.group_tiles * params.group_tiles;
    const int32_t members = min(params.group_tiles, first_lane + __popc(shared) - begin);
    group = lane < begin + members ? begin * 64 + members : 0;
  }
};

// A cluster's tickets: its position gives the first; its first block draws the others from a
// counter and tells the second. A ring of kTickets needs no signal that a slot is free: the blocks
// share the ring of stages, and a ticket is drawn only when the item before it has begun.
template <class Config>
struct ClusterTickets {
  SharedStorage<Config>& shared;
  TicketCounter counter;
  int32_t rank;
  uint32_t drawn = 0;
  uint32_t order = 0;

  // The number of the next item; a whole warp calls it.
  __device__ __forceinline__ int32_t next() {
    const auto slot = static_cast<int32_t>(order % Config::kTickets);
    const uint32_t phase = order / Config::kTickets % 2;
    if (rank == 0) {
      if (threadIdx.x % 32 == 0) {
        if (order == 0) counter.mark();
        drawn = counter.draw();
        ptx::publish_to_cluster(&shared.tickets[slot], drawn, &shared.ticket_full[slot], 1);
      }
      drawn = __shfl_sync(0xffffffffu, drawn, 0);
    } else {
      ptx::mbarrier_wait_cluster(&shared.ticket_full[slot], phase);
      drawn = *static_cast<volatile uint32_t*>(&shared.tickets[slot]);
    }
    ++order;
    return static_cast<int32_t>(gridDim.x / Config::kCluster + drawn);
  }
  // Every item draws one ticket, so the launch's last ticket has number `items` - 1.
  __device__ __forceinline__ void finish(int32_t items) const {
    if (order > 0 && rank == 0 && threadIdx.x % 32 == 0 &&
        drawn + 1 == static_cast<uint32_t>(items)) {
      counter.reset();
    }
  }
};

// The scale of weight block `which` (gate or up, or one of two chunks) of an item at column block
// 0.
template <class Config>
__device__ __forceinline__ const float* weight_scale_row(const Params& params, int32_t expert,
                                                         int32_t feature_tile, int32_t which) {
  const float* scales = params.weight_scales + expert * params.expert_scale_stride;
  if constexpr (Config::kProduct == Product::kUpGated) {
    return scales + which * params.half_scale_stride + int64_t{feature_tile} * params.scale_blocks;
  } else {
    // The last chunk may not exist; its sums are not stored.
    const int32_t blocks = (params.features + kScaleGroup - 1) / kScaleGroup;
    const int32_t block = min(feature_tile * 2 + which, blocks - 1);
    return scales + int64_t{block} * params.scale_blocks;
  }
}

// Prefetches to L1 the scales of an item's weights, which the producer reads one by one.
template <class Config>
__device__ __forceinline__ void prefetch_weight_scales(const Params& params, const Item& item,
                                                       int32_t lane) {
  if constexpr (Config::kBlockScales && !Config::kHasLanes) {
    constexpr int32_t kLine = 32;  // floats
    const float* row = weight_scale_row<Config>(params, item.expert, item.feature_tile, lane % 2);
    for (int32_t at = lane / 2 * kLine; at < params.scale_blocks; at += 16 * kLine) {
      ptx::prefetch_l1(row + at);
    }
  }
}

// True for a down product that awaits its rows item by item.
template <class Config>
__device__ __forceinline__ bool awaits_rows(const Params& params) {
  return Config::kIsDown && params.hands_over_tiles;
}

// Lets the next kernel begin once everything before this one is done, which the next one relies on.
template <class Config>
__device__ __forceinline__ void begin_next_kernel(const Params& params, int32_t lane) {
  ptx::grid_dependency_wait();
  if (!Config::kIsDown && params.hands_over_tiles && blockIdx.x == 0 && lane == 0) {
    *params.ended = 0;
    __threadfence();
  }
  __syncwarp();
  ptx::grid_launch_dependents();
}

// One warp finds the items of this block, one ahead of those that load them. It may read the tiles
// before the wait, because the kernel before this one has waited for the grouping.
template <class Config>
__device__ void tell_items(const Params& params, SharedStorage<Config>& shared) {
  const auto rank = static_cast<int32_t>(ptx::cluster_rank());
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  Walk<Config> walk{.tiles = __ldcg(params.num_tiles)};
  ClusterTickets<Config> tickets{shared, {params.tickets}, rank};
  auto number = static_cast<int32_t>(blockIdx.x) / Config::kCluster;
  uint32_t phase = 0;
  bool found = true;
  bool first = true;
  while (found) {
    Item item;
    found = walk.find(params, number, rank, item);
    if (found && item.count > 0) {
      prefetch_weight_scales<Config>(params, item, lane);
    }
    if (!found) item.expert = -1;
    if (lane == 0) {
      shared.item = item;
      ptx::mbarrier_arrive(&shared.item_full);
    }
    if (first && !awaits_rows<Config>(params)) begin_next_kernel<Config>(params, lane);
    first = false;
    if (!found) break;
    ptx::mbarrier_wait(&shared.item_empty, phase);
    phase ^= 1;
    number = tickets.next();
  }
  tickets.finish(walk.end);
  if (awaits_rows<Config>(params)) {
    begin_next_kernel<Config>(params, lane);
  }
}

}  // namespace conclave::inline v0::experts::tile_bytes
