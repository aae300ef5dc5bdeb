// The thread that draws a block's items, loads their weights, and their rows where these lie in
// order, and tells the other warps which items they are.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/ticket_counter.cuh"
#include "experts/cuda/sm90/stream/producer.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// Numbers of the items that follow a block's first. One is drawn for each item of a launch, while
// the item before it is loaded.
class UpNumbers {
 public:
  __device__ __forceinline__ UpNumbers(const Params& params, int32_t items)
      : tickets_{params.tickets}, items_(items) {}

  __device__ __forceinline__ void begin() const { tickets_.mark(); }
  __device__ __forceinline__ uint32_t draw() const { return tickets_.draw(); }
  __device__ __forceinline__ int32_t number(uint32_t drawn) const {
    if (drawn + 1 == static_cast<uint32_t>(items_)) tickets_.reset();
    return static_cast<int32_t>(gridDim.x + drawn);
  }

 private:
  TicketCounter tickets_;
  int32_t items_;
};

// The counter is one that the up product has cleared.
class DownNumbers {
 public:
  __device__ __forceinline__ explicit DownNumbers(const Params& params)
      : drawn_(&params.hand_over->drawn) {}

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ uint32_t draw() const { return ptx::add_relaxed(drawn_, 1); }
  __device__ __forceinline__ int32_t number(uint32_t drawn) const {
    return static_cast<int32_t>(gridDim.x + drawn);
  }

 private:
  uint32_t* drawn_;
};

// True if the up product has stored all the rows of this item.
template <class Config>
__device__ __forceinline__ bool is_ready(const Params& params, const Item& item) {
  return item.tile.count == 0 || params.items_before == 0 ||
         ptx::load_acquire(&params.tiles[item.tile_index].done) >=
             params.items_before * Config::kCountsOfItem;
}
template <class Config>
__device__ __forceinline__ void await_rows(const Params& params, const Item& item) {
  while (!is_ready<Config>(params, item)) __nanosleep(64);
  // Other blocks stored the rows through the generic proxy.
  ptx::fence_proxy_async();
}

// Loads the first item and all that are drawn behind it. The weights of the first `ahead` stages
// have been asked for.
template <class Config, Product kProduct, class Numbers>
__device__ __forceinline__ void load_items(const Walk<Config>& walk, SharedStorage<Config>& shared,
                                           const Numbers& numbers, Item item, int32_t ahead) {
  const Params& params = walk.params;
  RingPosition<Config::kStages> ring;
  uint32_t order = 0;
  tell_item(shared, order, item);
  if (item.tile.count > 0) numbers.begin();
  while (item.tile.count > 0) {
    const uint32_t drawn = numbers.draw();
    Item next;
    for (int32_t first = 0; first < params.depth_stages; first += Config::kBurst) {
      const int32_t end = min(first + Config::kBurst, params.depth_stages);
      // The tile is looked up while the ring is full.
      if (end == params.depth_stages) next = walk.at(numbers.number(drawn));
      claim_stages(shared, ring, ahead, end - first);
      for (int32_t stage = first; stage < end; ++stage) {
        if (ahead > 0) {
          --ahead;
        } else {
          expect_stage<Config, kProduct>(params, shared, ring.slot, item.tile.count);
          load_weights<Config, kProduct>(params, shared, ring.slot, item.tile.expert,
                                         item.feature_tile, stage);
        }
        if constexpr (kRowsInOrder<Config, kProduct> && !Config::kHasTokenRing) {
          load_rows<Config>(params, shared, ring.slot, item.tile, stage);
        }
        ring.advance();
      }
    }
    item = next;
    if constexpr (kProduct == Product::kDown) await_rows<Config>(params, item);
    tell_item(shared, ++order, item);
  }
}

// The down product draws only after all blocks of this kernel have let it begin, and so it sees
// these zeros.
__device__ __forceinline__ void clear_hand_over(const Params& params) {
  if (blockIdx.x != 0) return;
  *params.hand_over = HandOver();
  __threadfence();
}

template <class Config>
__device__ __forceinline__ void produce_up(const Params& params, SharedStorage<Config>& shared) {
  constexpr Product kProduct = Product::kUp;
  if (!params.groups_are_done) ptx::grid_dependency_wait();
  const Walk<Config> walk(params);
  const Item item = walk.at(static_cast<int32_t>(blockIdx.x));
  int32_t ahead = 0;
  if (item.tile.count > 0 && params.groups_are_done) {
    // Weights depend on no earlier kernel: the ring fills while its last blocks still run.
    ahead = load_ahead<Config, kProduct>(params, shared, item.tile, item.feature_tile);
  }
  ptx::grid_dependency_wait();
  clear_hand_over(params);
  // Earlier kernels stored the rows through the generic proxy.
  if constexpr (kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async();
  // This follows the wait: the kernel that may begin now relies on everything before this one being
  // done.
  ptx::grid_launch_dependents();
  load_items<Config, kProduct>(walk, shared, UpNumbers(params, walk.items), item, ahead);
}

// The last block that finds no item left resets the tiles' counts to 0.
__device__ __forceinline__ void end_drawing(const Params& params, int32_t num_tiles) {
  if (params.items_before == 0) return;
  if (ptx::add_relaxed(&params.hand_over->ended, 1) + 1 != gridDim.x) return;
  for (int32_t i = 0; i < num_tiles; ++i) params.tiles[i].done = 0;
}

template <class Config>
__device__ __forceinline__ void produce_down(const Params& params, SharedStorage<Config>& shared) {
  constexpr Product kProduct = Product::kDown;
  const Walk<Config> walk(params);
  const auto index = static_cast<int32_t>(blockIdx.x);
  const Item item = walk.at(index);
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
  load_items<Config, kProduct>(walk, shared, DownNumbers(params), item, ahead);
  // The kernel that may begin now relies on everything before this one being done.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  end_drawing(params, walk.num_tiles);
}

}  // namespace conclave::inline v0::experts::stream
