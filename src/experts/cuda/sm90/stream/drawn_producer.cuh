// The thread that fills the ring for items that blocks draw, in place of produce(). It tells the
// others which items they are.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/ticket_counter.cuh"
#include "experts/cuda/sm90/stream/producer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// True if the up product has stored all the rows of this item.
template <class Config>
__device__ __forceinline__ bool is_ready(const Params& params, const Item& item) {
  return item.tile.count == 0 || params.items_before == 0 ||
         ptx::load_acquire(&params.tiles[item.tile_index].done) >= params.items_before;
}
template <class Config>
__device__ __forceinline__ void await_rows(const Params& params, const Item& item) {
  while (!is_ready<Config>(params, item)) __nanosleep(64);
  // Other blocks stored the rows through the generic proxy.
  ptx::fence_proxy_async();
}

// The last block that finds no item left resets the tiles' counts to 0.
template <class Config>
__device__ __forceinline__ void end_drawing(const Params& params, int32_t num_tiles) {
  if (ptx::add_relaxed(&params.hand_over->ended, 1) + 1 != gridDim.x) return;
  for (int32_t i = 0; i < num_tiles; ++i) params.tiles[i].done = 0;
}

// produce() for kernels that draw items.
template <class Config>
__device__ __forceinline__ void produce_drawn(const Params& params, SharedStorage<Config>& shared) {
  constexpr Product kProduct = Product::kDown;
  const Walk<Config> walk(params);
  auto index = static_cast<int32_t>(blockIdx.x);
  Item item = walk.at(index);
  int32_t ahead = 0;
  if (index < walk.items) {
    // Weights do not depend on the up product: the ring fills while its last blocks still run.
    ahead = load_ahead<Config, kProduct>(params, shared, item.tile, item.feature_tile);
    if (params.items_before == 0 || !is_ready<Config>(params, item)) {
      prefetch_ahead(walk, index, ahead);
    }
  }
  if (params.items_before == 0) ptx::grid_dependency_wait();
  await_rows<Config>(params, item);
  uint32_t order = 0;
  tell_item(shared, order, item);
  RingPosition<Config::kStages> ring;
  while (item.tile.count > 0) {
    const uint32_t drawn = ptx::add_relaxed(&params.hand_over->drawn, 1);
    for (int32_t first = 0; first < params.depth_stages; first += Config::kBurst) {
      const int32_t end = min(first + Config::kBurst, params.depth_stages);
      claim_stages(shared, ring, ahead, end - first);
      for (int32_t stage = first; stage < end; ++stage) {
        if (ahead > 0) {
          --ahead;
        } else {
          expect_stage<Config, kProduct>(params, shared, ring.slot, item.tile.count);
          load_weights<Config, kProduct>(params, shared, ring.slot, item.tile.expert,
                                         item.feature_tile, stage);
        }
        load_rows<Config>(params, shared, ring.slot, item.tile, stage);
        ring.advance();
      }
    }
    item = walk.at(static_cast<int32_t>(gridDim.x + drawn));
    await_rows<Config>(params, item);
    tell_item(shared, ++order, item);
  }
  // The kernel that may begin now relies on everything before this one being done.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  end_drawing<Config>(params, walk.num_tiles);
}

// produce() for up products that draw items: nothing is awaited but earlier kernels.
template <class Config>
__device__ __forceinline__ void produce_drawn_up(const Params& params,
                                                 SharedStorage<Config>& shared) {
  constexpr Product kProduct = Product::kUp;
  static_assert(!kRowsInOrder<Config, kProduct>);
  if (!params.groups_are_done) ptx::grid_dependency_wait();
  const Walk<Config> walk(params);
  Item item = walk.at(static_cast<int32_t>(blockIdx.x));
  int32_t ahead = 0;
  if (item.tile.count > 0 && params.groups_are_done) {
    // Weights depend on no earlier kernel: the ring fills while its last blocks still run.
    ahead = load_ahead<Config, kProduct>(params, shared, item.tile, item.feature_tile);
  }
  ptx::grid_dependency_wait();
  clear_hand_over(params);
  // This follows the wait: the kernel that may begin now relies on everything before this one being
  // done.
  ptx::grid_launch_dependents();
  uint32_t order = 0;
  tell_item(shared, order, item);
  const TicketCounter tickets{params.tickets};
  if (item.tile.count > 0) tickets.mark();
  RingPosition<Config::kStages> ring;
  while (item.tile.count > 0) {
    const uint32_t drawn = tickets.draw();
    for (int32_t first = 0; first < params.depth_stages; first += Config::kBurst) {
      const int32_t end = min(first + Config::kBurst, params.depth_stages);
      claim_stages(shared, ring, ahead, end - first);
      for (int32_t stage = first; stage < end; ++stage) {
        if (ahead > 0) {
          --ahead;
        } else {
          expect_stage<Config, kProduct>(params, shared, ring.slot, item.tile.count);
          load_weights<Config, kProduct>(params, shared, ring.slot, item.tile.expert,
                                         item.feature_tile, stage);
        }
        ring.advance();
      }
    }
    // One is drawn behind each item.
    if (drawn + 1 == static_cast<uint32_t>(walk.items)) tickets.reset();
    item = walk.at(static_cast<int32_t>(gridDim.x + drawn));
    tell_item(shared, ++order, item);
  }
}

}  // namespace conclave::inline v0::experts::stream
