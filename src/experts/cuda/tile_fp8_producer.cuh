// The loading warpgroup of tile_fp8_sm90.cuh.
#pragma once

#include "experts/cuda/tile_fp8_config.cuh"

namespace conclave::inline v0::experts::tile_fp8 {

// A tile that one block can hold all rows of is cut along the weight rows.
template <class C>
__device__ __forceinline__ TileView view_tile(const Params& p, const TokenTile& tile, int32_t part,
                                              int32_t rank) {
  if (tile.count > C::kTokens) {
    return {.expert = tile.expert,
            .begin = tile.begin + rank * C::kTokens,
            .count = rank == 0 ? C::kTokens : tile.count - C::kTokens,
            .feature_tile = part,
            .shares_weights = true};
  }
  const int32_t feature_tile = part * C::kCluster + rank;
  return {.expert = tile.expert,
          .begin = tile.begin,
          .count = feature_tile < p.feature_tiles ? tile.count : 0,
          .feature_tile = feature_tile};
}

// Finds pieces of work by number; numbers must not fall. Lane i of a warp knows tile first + i.
template <class C>
struct WorkFinder {
  int32_t tiles = 0;
  int32_t first = -32;
  int32_t end_of_lane = 0;  // number of the piece after those of tiles up to this lane's
  int32_t end = 0;          // after those of all lanes

  // Whether there is a piece of this number.
  __device__ __forceinline__ bool find(const Params& p, int32_t work, int32_t rank,
                                       TileView& view) {
    while (work >= end) {
      first += 32;
      if (first >= tiles) return false;
      count_pieces(p);
    }
    const uint32_t ends_after = __ballot_sync(0xffffffffu, end_of_lane > work);
    const int32_t lane = __ffs(static_cast<int>(ends_after)) - 1;
    const TokenTile tile = p.tiles[first + lane];
    const int32_t pieces = pieces_of(p, tile.count);
    view =
        view_tile<C>(p, tile, work - (__shfl_sync(0xffffffffu, end_of_lane, lane) - pieces), rank);
    return true;
  }

 private:
  static __device__ __forceinline__ int32_t pieces_of(const Params& p, int32_t count) {
    return count > C::kTokens ? p.feature_tiles : (p.feature_tiles + C::kCluster - 1) / C::kCluster;
  }
  __device__ __forceinline__ void count_pieces(const Params& p) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t pieces = first + lane < tiles ? pieces_of(p, p.tiles[first + lane].count) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, pieces, distance);
      if (lane >= distance) pieces += before;
    }
    end_of_lane = end + pieces;
    end = __shfl_sync(0xffffffffu, end_of_lane, 31);
  }
};

// Both halves of 128 weight rows, or one of them to both blocks of the cluster.
template <class C>
__device__ __forceinline__ void load_weights(const CUtensorMap* map, SharedStorage<C>& s,
                                             int32_t stage, int32_t k, const TileView& tile,
                                             int32_t rank) {
  constexpr int32_t kHalfRows = C::kWeightRows / 2;
  constexpr uint16_t kBothBlocks = 3;
  uint64_t* full = &s.full[stage];
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    if (tile.shares_weights && half != rank) continue;
    void* destination = s.weights[stage] + half * kHalfRows * C::kDepth;
    if constexpr (C::kProduct == Product::kGated) {
      const int32_t group = tile.feature_tile * (C::kFeatures / 8) + half * (kHalfRows / 16);
      if (tile.shares_weights) {
        dev::tma_load_5d_multicast(map, full, destination, kBothBlocks, k, 0, 0, group,
                                   tile.expert);
      } else {
        dev::tma_load_5d(map, full, destination, k, 0, 0, group, tile.expert);
      }
    } else {
      const int32_t row = tile.feature_tile * C::kFeatures + half * kHalfRows;
      if (tile.shares_weights) {
        dev::tma_load_3d_multicast(map, full, destination, kBothBlocks, k, row, tile.expert);
      } else {
        dev::tma_load_3d(map, full, destination, k, row, tile.expert);
      }
    }
  }
}

// Scale of weight block `which` (gate and up, or the two chunks) of a tile at column block 0.
template <class C>
__device__ __forceinline__ const float* weight_scale_row(const Params& p, int32_t expert,
                                                         int32_t feature_tile, int32_t which) {
  const float* scales = p.weight_scales + expert * p.expert_scale_stride;
  if constexpr (C::kProduct == Product::kGated) {
    return scales + which * p.half_scale_stride + int64_t{feature_tile} * p.scale_blocks;
  } else {
    // The last chunk may not exist; its sums are not stored.
    const int32_t blocks = (p.features + 127) / 128;
    const int32_t block = min(feature_tile * 2 + which, blocks - 1);
    return scales + int64_t{block} * p.scale_blocks;
  }
}

// Gathers this warp's 32 token rows: eight lanes a row, so eight copies of a thread a stage, whose
// addresses are worked out once a tile.
template <class C>
struct Gather {
  static constexpr int kCopies = 8;
  static constexpr int kRowsOfCopy = 4;
  const uint8_t* source[kCopies];
  uint32_t even = 0;  // offset in a stage of copy 0, and of copy 1 less its rows: the swizzle
  uint32_t odd = 0;   // repeats every second copy
  int32_t copies = 0;

  // `token` is that of row `lane` of the warp.
  __device__ __forceinline__ void start(const Params& p, int32_t warp, int32_t token,
                                        int32_t count) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t chunk = lane % 8;
    const int32_t row = lane / 8;
    even = static_cast<uint32_t>((warp * 32 + row) * C::kDepth + (chunk ^ row) * 16);
    odd = even ^ 64;
    copies = max(0, min(kCopies, (count - warp * 32 + kRowsOfCopy - 1) / kRowsOfCopy));
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t from = __shfl_sync(0xffffffffu, token, kRowsOfCopy * i + row);
      source[i] = p.rows + from * p.row_stride + chunk * 16;
    }
  }
  __device__ __forceinline__ uint32_t target(uint32_t stage, int i) const {
    return stage + (i % 2 == 0 ? even : odd) + i * kRowsOfCopy * C::kDepth;
  }
  __device__ __forceinline__ void load(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i < copies) dev::cp_async_16(target(stage, i), source[i], true);
      source[i] += C::kDepth;
    }
  }
  // The last `columns` columns of K, zeros beyond.
  __device__ __forceinline__ void load_tail(const Params& p, uint32_t stage, int32_t columns) {
    const int32_t bytes = max(0, min(16, columns - static_cast<int32_t>(threadIdx.x) % 8 * 16));
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i < copies) {
        dev::cp_async_16_part(target(stage, i), bytes > 0 ? source[i] : p.rows, bytes);
      }
    }
  }
};

// Where a producer thread finds the scales of its tile: of its token row, and of one of two weight
// blocks where it is one of the first two threads.
struct ScaleSource {
  const float* token = nullptr;
  const float* weight = nullptr;
};

template <class C>
__device__ __forceinline__ ScaleSource find_scales(const Params& p, const TileView& tile,
                                                   int32_t thread, int32_t token) {
  ScaleSource source;
  if constexpr (C::kBlockScales) {
    if (thread < tile.count) source.token = p.row_scales + token * p.row_scale_stride;
    if (thread < 2 && tile.count > 0) {
      source.weight = weight_scale_row<C>(p, tile.expert, tile.feature_tile, thread);
    }
  }
  return source;
}

template <class C>
__device__ __forceinline__ void load_scales(const Params& p, ScaleSource& source, StageInfo& info,
                                            int32_t thread) {
  if constexpr (C::kBlockScales) {
    if (source.token != nullptr) {
      dev::cp_async_4(dev::shared_address(&info.token_scale[thread]), source.token, true);
      source.token += p.group_scale_stride;
    }
    if (source.weight != nullptr) {
      dev::cp_async_4(dev::shared_address(&info.weight_scale[thread]), source.weight++, true);
    }
  }
}

// By one thread: what the copy engine brings.
template <class C>
__device__ __forceinline__ void load_boxes(const CUtensorMap* token_map,
                                           const CUtensorMap* weight_map, SharedStorage<C>& s,
                                           int32_t stage, int32_t k, const TileView& tile,
                                           int32_t rank) {
  constexpr uint32_t kWeightBytes = C::kWeightRows * C::kDepth;
  constexpr uint32_t kTokenBytes = C::kGathers ? 0 : C::kTokens * C::kDepth;
  StageInfo& info = s.info[stage];
  info.expert = tile.expert;
  info.begin = tile.begin;
  info.count = tile.count;
  info.feature_tile = tile.feature_tile;
  dev::mbarrier_arrive_expect_tx(&s.full[stage], kWeightBytes + kTokenBytes);
  load_weights<C>(weight_map, s, stage, k, tile, rank);
  if constexpr (!C::kGathers) {
    dev::tma_load_2d(token_map, &s.full[stage], s.tokens[stage], k, tile.begin);
  }
}

template <class C>
__device__ void produce(const Params& p, const CUtensorMap* token_map,
                        const CUtensorMap* weight_map, SharedStorage<C>& s) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - C::kMathThreads;
  const auto rank = static_cast<int32_t>(dev::cluster_rank());
  const int32_t steps = (p.depth + C::kDepth - 1) / C::kDepth;
  const auto clusters = static_cast<int32_t>(gridDim.x) / C::kCluster;
  WorkFinder<C> finder{.tiles = *p.num_tiles};
  TileView tile;
  Phases phases;
  int32_t stage = 0;
  for (auto work = static_cast<int32_t>(blockIdx.x) / C::kCluster; finder.find(p, work, rank, tile);
       work += clusters) {
    int32_t token = tile.begin + thread;
    if constexpr (C::kGathers) {
      token = thread < tile.count ? p.row_slot[token] / p.top_k : 0;
    }
    ScaleSource scales = find_scales<C>(p, tile, thread, token);
    Gather<C> gather;
    if constexpr (C::kGathers) gather.start(p, thread / 32, token, tile.count);
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t k = step * C::kDepth;
      dev::mbarrier_wait(&s.empty[stage], phases.of(stage) ^ 1);
      phases.flip(stage);
      if (thread == 0) load_boxes<C>(token_map, weight_map, s, stage, k, tile, rank);
      if constexpr (C::kGathers) {
        const uint32_t target = dev::shared_address(s.tokens[stage]);
        if (k + C::kDepth <= p.depth) {
          gather.load(target);
        } else {
          gather.load_tail(p, target, p.depth - k);
        }
      }
      load_scales<C>(p, scales, s.info[stage], thread);
      // Counts when this thread's copies have landed; no later step is held up by them.
      dev::cp_async_mbarrier_arrive_noinc(&s.full[stage]);
      stage = (stage + 1) % C::kStages;
    }
  }
  dev::mbarrier_wait(&s.empty[stage], phases.of(stage) ^ 1);
  if (thread == 0) {
    s.info[stage].expert = -1;
    dev::mbarrier_arrive(&s.full[stage]);
  }
  dev::mbarrier_arrive(&s.full[stage]);
}

}  // namespace conclave::inline v0::experts::tile_fp8
