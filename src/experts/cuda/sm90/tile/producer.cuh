// Loads of tile_sm90: weights come by TMA, rows by TMA or by a gather.
#pragma once

#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/tile/queue.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile_sm90 {

// True if a thread of this block tells its cluster what to do.
template <class Config>
__device__ __forceinline__ bool gives_orders() {
  return Config::kCluster == 1 || cluster_rank() == 0;
}

// One thread loads the weights of a stage. `stage_bytes` is all that will land in this block.
template <class Config>
__device__ __forceinline__ void load_features(const Params& params, SharedStorage<Config>& shared,
                                              int32_t stage, const Work& work, int32_t k,
                                              uint32_t stage_bytes) {
  uint64_t* full = &shared.full[stage];
  mbarrier_arrive_expect_tx(full, stage_bytes);
  constexpr int32_t kBoxRows = Config::kBoxFeatures;
  const auto load = [&](int32_t part, auto... multicast) {
    uint8_t* destination = shared.features[stage] + part * kBoxRows * Config::kRowBytes;
    const int32_t first = work.first_feature + part * kBoxRows;
    if constexpr (sizeof...(multicast) > 0) {
      if constexpr (Config::kProduct == Product::kUpGated) {
        tma_load_5d_multicast(&params.weights, full, destination, 3, k, 0, 0, first / 16,
                              work.tile.expert);
      } else {
        tma_load_3d_multicast(&params.weights, full, destination, 3, k, first, work.tile.expert);
      }
    } else if constexpr (Config::kProduct == Product::kUpGated) {
      tma_load_5d(&params.weights, full, destination, k, 0, 0, first / 16, work.tile.expert);
    } else {
      tma_load_3d(&params.weights, full, destination, k, first, work.tile.expert);
    }
  };
  if constexpr (Config::kCluster > 1) {
    if (work.shared) {
      load(static_cast<int32_t>(cluster_rank()), true);
      return;
    }
  }
  load(0);
  if (Config::kBoxFeatures < Config::kFeatures && !work.half) load(1);
}

template <class Config>
__device__ __forceinline__ uint32_t feature_bytes(const Work& work) {
  return static_cast<uint32_t>(work.half ? Config::kFeatureBytes / 2 : Config::kFeatureBytes);
}

// For rows in token order: four warps gather them by cp.async while one of their threads starts the
// copies of weights. Rows arrive at the stage's barrier when they have landed.
template <class Config>
struct GatherProducer {
  static constexpr int kRowsEach = Config::kTokens / 16;

  const Params& params;
  SharedStorage<Config>& shared;
  int32_t first_row;  // this thread's first; its others are 16 apart
  int32_t chunk;      // 16-byte chunk of a row's 128 bytes

  // Reads the slots of the rows one tile ahead: loads that wait for one another would empty the
  // ring.
  __device__ __forceinline__ void read_slots(const Work& work, uint32_t (&slots)[kRowsEach]) const {
    if (!work.valid) return;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int32_t row = min(first_row + 16 * i, max(work.tile.count - 1, 0));
      slots[i] = static_cast<uint32_t>(__ldg(params.row_slot + work.tile.begin + row));
    }
  }

  // Rows beyond the tile are left as they are: their sums are not stored.
  __device__ __forceinline__ void gather(const uint32_t (&tokens)[kRowsEach], int32_t count,
                                         int32_t k, uint32_t destination) const {
    const int32_t column = k + chunk * 8;
    const int32_t bytes = 2 * max(0, min(8, params.depth - column));
    const char* source = static_cast<const char*>(params.input) + (bytes > 0 ? 2 * column : 0);
    const auto stride_bytes = static_cast<uint32_t>(2 * params.input_stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (first_row + 16 * i < count) {
        cp_async_16_part(destination + i * 16 * Config::kRowBytes,
                         source + static_cast<uint64_t>(tokens[i]) * stride_bytes, bytes);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    // With the swizzle, chunk c of row r lies at c ^ (r % 8), which is the same for rows 16 apart.
    const auto offset =
        static_cast<uint32_t>(first_row * Config::kRowBytes + ((chunk ^ (first_row % 8)) * 16));
    const uint32_t base = shared_address(shared.tokens[0]) + offset;
    RingPosition<Config::kStages> position;
    const TileWalk<Config> walk(params);
    OrderReader<Config> orders{walk, shared, false};
    OrderGiver<Config> giver(params, walk, shared);
    const bool gives = threadIdx.x == 0 && gives_orders<Config>();
    Work work = orders.first();
    const int32_t depth = stages_of_tile<Config>(params) * Config::kDepth;
    uint32_t slots[kRowsEach];
    read_slots(work, slots);
    if (gives) giver.begin();
    while (work.valid) {
      uint32_t tokens[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        tokens[i] = slots[i] / static_cast<uint32_t>(params.top_k);
      }
      if (gives) giver.give();
      const Work following = orders.next();
      read_slots(following, slots);
      for (int32_t k = 0; k < depth; k += Config::kDepth) {
        mbarrier_wait(&shared.empty[position.slot], position.phase ^ 1);
        if (threadIdx.x == 0) {
          load_features<Config>(params, shared, position.slot, work, k,
                                feature_bytes<Config>(work));
        }
        __syncwarp();
        gather(tokens, work.tile.count, k,
               base + static_cast<uint32_t>(position.slot * Config::kTokenBytes));
        cp_async_mbarrier_arrive_noinc(&shared.full[position.slot]);
        position.advance();
      }
      work = following;
    }
  }
};

// For sorted rows: one thread starts the copies of both operands.
template <class Config>
__device__ __forceinline__ void produce_sorted(const Params& params,
                                               SharedStorage<Config>& shared) {
  RingPosition<Config::kStages> position;
  const TileWalk<Config> walk(params);
  OrderReader<Config> orders{walk, shared, true};
  const int32_t depth = stages_of_tile<Config>(params) * Config::kDepth;
  Work work = orders.first();
  while (work.valid) {
    const int32_t boxes = (work.tile.count + 63) / 64;
    const uint32_t bytes =
        feature_bytes<Config>(work) + static_cast<uint32_t>(boxes * 64 * Config::kRowBytes);
    for (int32_t k = 0; k < depth; k += Config::kDepth) {
      mbarrier_wait(&shared.empty[position.slot], position.phase ^ 1);
      load_features<Config>(params, shared, position.slot, work, k, bytes);
      for (int32_t box = 0; box < boxes; ++box) {
        tma_load_2d(&params.rows, &shared.full[position.slot],
                    shared.tokens[position.slot] + box * 64 * Config::kRowBytes, k,
                    work.tile.begin + box * 64);
      }
      position.advance();
    }
    work = orders.next();
  }
}

// For sorted rows: another thread draws tickets and gives orders.
template <class Config>
__device__ __forceinline__ void give_orders(const Params& params, SharedStorage<Config>& shared) {
  const TileWalk<Config> walk(params);
  OrderGiver<Config> giver(params, walk, shared);
  giver.begin();
  while (giver.give()) {
  }
}

}  // namespace conclave::inline v0::experts::tile_sm90
