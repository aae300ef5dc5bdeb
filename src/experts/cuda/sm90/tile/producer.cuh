// Fills the ring: weights come by TMA, rows by TMA or by a gather.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/tile/walk.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::tile {

// True if a thread of this block tells the cluster its items.
template <class Config>
__device__ __forceinline__ bool tells_items() {
  return Config::kCluster == 1 || ptx::cluster_rank() == 0;
}

// One thread loads the weights of a stage. `stage_bytes` is all that will land in this block.
template <class Config>
__device__ __forceinline__ void load_features(const Params& params, SharedStorage<Config>& shared,
                                              int32_t stage, const Item& item, int32_t k,
                                              uint32_t stage_bytes) {
  uint64_t* full = &shared.full[stage];
  ptx::mbarrier_arrive_expect_tx(full, stage_bytes);
  constexpr int32_t kBoxRows = Config::kBoxFeatures;
  const auto load = [&](int32_t part, auto... multicast) {
    uint8_t* destination = shared.features[stage] + part * kBoxRows * Config::kRowBytes;
    const int32_t first = item.first_feature + part * kBoxRows;
    if constexpr (sizeof...(multicast) > 0) {
      if constexpr (Config::kProduct == Product::kUpGated) {
        ptx::tma_load_5d_multicast(&params.weights, full, destination, 3, k, 0, 0, first / 16,
                                   item.tile.expert);
      } else {
        ptx::tma_load_3d_multicast(&params.weights, full, destination, 3, k, first,
                                   item.tile.expert);
      }
    } else if constexpr (Config::kProduct == Product::kUpGated) {
      ptx::tma_load_5d(&params.weights, full, destination, k, 0, 0, first / 16, item.tile.expert);
    } else {
      ptx::tma_load_3d(&params.weights, full, destination, k, first, item.tile.expert);
    }
  };
  if constexpr (Config::kCluster > 1) {
    if (item.shared) {
      load(static_cast<int32_t>(ptx::cluster_rank()), true);
      return;
    }
  }
  load(0);
  if (Config::kBoxFeatures < Config::kFeatures && !item.half) load(1);
}

template <class Config>
__device__ __forceinline__ uint32_t feature_bytes(const Item& item) {
  return static_cast<uint32_t>(item.half ? Config::kFeatureBytes / 2 : Config::kFeatureBytes);
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

  // Reads the slots of the rows one item ahead: loads that wait for one another would empty the
  // ring.
  __device__ __forceinline__ void read_slots(const Item& item, uint32_t (&slots)[kRowsEach]) const {
    if (!item.valid) return;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int32_t row = min(first_row + 16 * i, max(item.tile.count - 1, 0));
      slots[i] = static_cast<uint32_t>(__ldg(params.row_slot + item.tile.begin + row));
    }
  }

  // Rows beyond the item are left as they are, since their sums are not stored.
  __device__ __forceinline__ void gather(const uint32_t (&tokens)[kRowsEach], int32_t count,
                                         int32_t k, uint32_t destination) const {
    const int32_t column = k + chunk * 8;
    const int32_t bytes = 2 * max(0, min(8, params.depth - column));
    const char* source = static_cast<const char*>(params.input) + (bytes > 0 ? 2 * column : 0);
    const auto stride_bytes = static_cast<uint32_t>(2 * params.input_stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (first_row + 16 * i < count) {
        ptx::cp_async_16_part(destination + i * 16 * Config::kRowBytes,
                              source + static_cast<uint64_t>(tokens[i]) * stride_bytes, bytes);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    // With the swizzle, chunk c of row r lies at c ^ (r % 8), which is the same for rows 16 apart.
    const auto offset =
        static_cast<uint32_t>(first_row * Config::kRowBytes + ((chunk ^ (first_row % 8)) * 16));
    const uint32_t base = ptx::shared_address(shared.tokens[0]) + offset;
    RingPosition<Config::kStages> ring;
    const Walk<Config> walk(params);
    ItemReader<Config> items{walk, shared, false};
    ItemTeller<Config> teller(params, walk, shared);
    const bool tells = threadIdx.x == 0 && tells_items<Config>();
    Item item = items.first();
    const int32_t depth = stages_of_item<Config>(params) * Config::kDepth;
    uint32_t slots[kRowsEach];
    read_slots(item, slots);
    if (tells) teller.begin();
    while (item.valid) {
      uint32_t tokens[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        tokens[i] = slots[i] / static_cast<uint32_t>(params.top_k);
      }
      if (tells) teller.tell();
      const Item following = items.next();
      read_slots(following, slots);
      for (int32_t k = 0; k < depth; k += Config::kDepth) {
        ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
        if (threadIdx.x == 0) {
          load_features<Config>(params, shared, ring.slot, item, k, feature_bytes<Config>(item));
        }
        __syncwarp();
        gather(tokens, item.tile.count, k,
               base + static_cast<uint32_t>(ring.slot * Config::kTokenBytes));
        ptx::cp_async_mbarrier_arrive_noinc(&shared.full[ring.slot]);
        ring.advance();
      }
      item = following;
    }
  }
};

// For sorted rows: one thread starts the copies of both operands.
template <class Config>
__device__ __forceinline__ void produce_sorted(const Params& params,
                                               SharedStorage<Config>& shared) {
  RingPosition<Config::kStages> ring;
  const Walk<Config> walk(params);
  ItemReader<Config> items{walk, shared, true};
  const int32_t depth = stages_of_item<Config>(params) * Config::kDepth;
  Item item = items.first();
  while (item.valid) {
    const int32_t boxes = (item.tile.count + 63) / 64;
    const uint32_t bytes =
        feature_bytes<Config>(item) + static_cast<uint32_t>(boxes * 64 * Config::kRowBytes);
    for (int32_t k = 0; k < depth; k += Config::kDepth) {
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
      load_features<Config>(params, shared, ring.slot, item, k, bytes);
      for (int32_t box = 0; box < boxes; ++box) {
        ptx::tma_load_2d(&params.rows, &shared.full[ring.slot],
                         shared.tokens[ring.slot] + box * 64 * Config::kRowBytes, k,
                         item.tile.begin + box * 64);
      }
      ring.advance();
    }
    item = items.next();
  }
}

// For sorted rows: another thread draws tickets and tells items.
template <class Config>
__device__ __forceinline__ void tell_items(const Params& params, SharedStorage<Config>& shared) {
  const Walk<Config> walk(params);
  ItemTeller<Config> teller(params, walk, shared);
  teller.begin();
  while (teller.tell()) {
  }
}

}  // namespace conclave::inline v0::experts::tile
