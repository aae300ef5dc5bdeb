// Fills the ring: one warp has the rows, weights and scales of its block's items copied.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/sm90/tile_bytes/walk.cuh"

namespace conclave::inline v0::experts::tile_bytes {

// Loads both halves of 128 weight rows, or one half to both blocks of the cluster.
template <class Config>
__device__ __forceinline__ void load_weights(const CUtensorMap* map, SharedStorage<Config>& shared,
                                             int32_t stage, int32_t k, const Item& item,
                                             int32_t rank) {
  constexpr int32_t kHalfRows = Config::kWeightRows / 2;
  constexpr uint16_t kBothBlocks = 3;
  uint64_t* full = &shared.full[stage];
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    if (item.shares_weights && half != rank) continue;
    void* destination = shared.weights[stage] + half * kHalfRows * Config::kDepth;
    if constexpr (Config::kProduct == Product::kUpGated) {
      const int32_t group = item.feature_tile * (Config::kFeatures / 8) + half * (kHalfRows / 16);
      if (item.shares_weights) {
        ptx::tma_load_5d_multicast(map, full, destination, kBothBlocks, k, 0, 0, group,
                                   item.expert);
      } else {
        ptx::tma_load_5d(map, full, destination, k, 0, 0, group, item.expert);
      }
    } else {
      const int32_t row = item.feature_tile * Config::kFeatures + half * kHalfRows;
      if (item.shares_weights) {
        ptx::tma_load_3d_multicast(map, full, destination, kBothBlocks, k, row, item.expert);
      } else {
        ptx::tma_load_3d(map, full, destination, k, row, item.expert);
      }
    }
  }
}

// Waits until the up product has stored the rows of an item: every consumer warp of a block counts
// once for each item of the up product.
template <class Config>
__device__ __forceinline__ void await_rows(const Params& params, const Item& item) {
  const int32_t blocks = item.shares_weights ? Config::kCluster : 1;
  const auto count =
      static_cast<uint32_t>(blocks * params.up_feature_tiles * (Config::kConsumerThreads / 32));
  while (ptx::load_acquire(&params.tiles[item.tile_index].done) < count) __nanosleep(64);
  // Other blocks stored the rows through the generic proxy.
  ptx::fence_proxy_async();
}

// The last block that awaits no more items resets the tiles' counts to 0.
template <class Config>
__device__ __forceinline__ void end_awaiting(const Params& params) {
  if (ptx::add_relaxed(params.ended, 1) + 1 != gridDim.x) return;
  for (int32_t i = 0; i < *params.num_tiles; ++i) params.tiles[i].done = 0;
}

// The state of the loading warp, with its place in the ring.
template <class Config>
struct Producer {
  const Params& params;
  const CUtensorMap* token_map;
  const CUtensorMap* weight_map;
  SharedStorage<Config>& shared;
  int32_t rank;
  int32_t lane;
  int32_t stage = 0;
  int32_t loaded = 0;  // stages of the first item whose weights were requested
  RingPhases phases;

  __device__ __forceinline__ void await_stage() {
    ptx::mbarrier_wait(&shared.empty[stage], phases.of(stage) ^ 1);
    phases.flip(stage);
  }
  static __device__ __forceinline__ int32_t boxes_of(const Item& item) {
    return (item.count + Config::kBoxTokens - 1) / Config::kBoxTokens;
  }
  static __device__ __forceinline__ uint32_t scale_bytes_of(const Item& item) {
    if (!Config::kBlockScales || item.count == 0) return 0;
    return static_cast<uint32_t>((item.begin % 4 + item.count + 3) / 4 * 16);
  }
  // Those that copies bring: decoders write weights of lanes, or send them to the other block.
  static __device__ __forceinline__ uint32_t weight_bytes_of(const Item& item) {
    constexpr uint32_t kHalf = Config::kWeightRows / 2 * Config::kDepth;
    if constexpr (Config::kHasLanes) return item.shares_weights ? kHalf : 0;
    return 2 * kHalf;
  }
  // One thread calls this, and load_rows.
  __device__ __forceinline__ void load_weight_boxes(const Item& item, int32_t step) const {
    const auto token_bytes =
        static_cast<uint32_t>(boxes_of(item) * Config::kBoxTokens * Config::kDepth);
    ptx::mbarrier_expect_tx(&shared.full[stage],
                            weight_bytes_of(item) + token_bytes + scale_bytes_of(item));
    if constexpr (!Config::kHasLanes) {
      load_weights<Config>(weight_map, shared, stage, step * Config::kDepth, item, rank);
    }
  }
  // Loads the token rows and their scales.
  __device__ __forceinline__ void load_rows(const Item& item, int32_t step) const {
    uint64_t* full = &shared.full[stage];
    const int32_t k = step * Config::kDepth;
    const int32_t boxes = boxes_of(item);
    const int32_t before = item.begin % 4;
    const uint32_t scale_bytes = scale_bytes_of(item);
#pragma unroll
    for (int32_t box = 0; box < Config::kTokens / Config::kBoxTokens; ++box) {
      const int32_t row = box * Config::kBoxTokens;
      if (box >= boxes) continue;
      ptx::tma_load_2d(token_map, full, shared.tokens[stage] + row * Config::kDepth, k,
                       item.begin + row);
    }
    if (scale_bytes > 0) {
      ptx::bulk_load(shared.info[stage].token_scale,
                     params.row_scales + step * params.group_scale_stride + (item.begin - before),
                     scale_bytes, full);
    }
  }
  // The warp loads weights of the first item, as many stages as the ring holds; they depend on no
  // earlier kernel.
  __device__ __forceinline__ void load_ahead(const Item& item, int32_t steps) {
    loaded = min(Config::kStages, steps);
    for (stage = 0; stage < loaded; ++stage) {
      await_stage();
      if (lane == 0) load_weight_boxes(item, stage);
    }
    if (Config::kIsDown && lane == 0) prefetch_weights(item, loaded, steps);
    stage = 0;
  }
  // Prefetches to L2 the weights of steps after those of load_ahead: memory would otherwise idle
  // while the last blocks of the up product end.
  __device__ __forceinline__ void prefetch_weights(const Item& item, int32_t first,
                                                   int32_t steps) const {
    const int32_t end = min(steps, first + Config::kStepsAhead);
    for (int32_t step = first; step < end; ++step) {
      for (int32_t half = 0; half < 2; ++half) {
        if (item.shares_weights && half != rank) continue;
        ptx::tma_prefetch_3d(
            weight_map, step * Config::kDepth,
            item.feature_tile * Config::kFeatures + half * (Config::kWeightRows / 2), item.expert);
      }
    }
  }
  // The warp calls this. Two lanes load the scales of the weights, one step ahead.
  __device__ __forceinline__ void load_item(const Item& item, int32_t steps) {
    const float* weight_scales = nullptr;
    if (Config::kBlockScales && !Config::kHasLanes && lane < 2 && item.count > 0) {
      weight_scales = weight_scale_row<Config>(params, item.expert, item.feature_tile, lane);
    }
    float ahead = weight_scales == nullptr ? 1 : __ldg(weight_scales);
    for (int32_t step = 0; step < steps; ++step) {
      const bool has_weights = loaded > 0;
      if (has_weights) {
        --loaded;
      } else {
        await_stage();
      }
      StageInfo& info = shared.info[stage];
      if (lane == 0) {
        if (!has_weights) load_weight_boxes(item, step);
        load_rows(item, step);
        info.item = item;
      }
      if (!Config::kHasLanes && lane < 2) info.weight_scale[lane] = ahead;
      if (weight_scales != nullptr) ahead = __ldg(weight_scales + min(step + 1, steps - 1));
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.full[stage]);
      stage = (stage + 1) % Config::kStages;
    }
  }
};

// One warp loads the items that tell_items finds.
template <class Config>
__device__ void produce(const Params& params, const CUtensorMap* token_map,
                        const CUtensorMap* weight_map, SharedStorage<Config>& shared) {
  const int32_t steps = (params.depth + Config::kDepth - 1) / Config::kDepth;
  Producer<Config> loader{.params = params,
                          .token_map = token_map,
                          .weight_map = weight_map,
                          .shared = shared,
                          .rank = static_cast<int32_t>(ptx::cluster_rank()),
                          .lane = static_cast<int32_t>(threadIdx.x) % 32};
  uint32_t phase = 0;
  bool first = true;
  for (;;) {
    ptx::mbarrier_wait(&shared.item_full, phase);
    phase ^= 1;
    const Item item = shared.item;
    __syncwarp();
    if (first) {
      if (!Config::kHasLanes && item.expert >= 0) loader.load_ahead(item, steps);
      if (!awaits_rows<Config>(params)) ptx::grid_dependency_wait();
      // Earlier kernels stored the rows through the generic proxy.
      ptx::fence_proxy_async();
      first = false;
    }
    if (item.expert < 0) break;
    if (loader.lane == 0) {
      ptx::mbarrier_arrive(&shared.item_empty);
      if (awaits_rows<Config>(params) && item.count > 0) await_rows<Config>(params, item);
    }
    __syncwarp();
    loader.load_item(item, steps);
  }
  if (awaits_rows<Config>(params) && loader.lane == 0) end_awaiting<Config>(params);
  loader.await_stage();
  if (loader.lane != 0) return;
  shared.info[loader.stage].item.expert = -1;
  ptx::mbarrier_arrive(&shared.full[loader.stage]);
}

}  // namespace conclave::inline v0::experts::tile_bytes
