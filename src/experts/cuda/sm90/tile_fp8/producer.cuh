// The warps of tile_fp8_sm90.cuh that find tiles and load them.
#pragma once

#include "experts/cuda/common/ticket_counter.cuh"
#include "experts/cuda/sm90/tile_fp8/config.cuh"

namespace conclave::inline v0::experts::tile_fp8 {

// If one block can hold all rows of a tile, the blocks divide its weight rows instead.
template <class C>
__device__ __forceinline__ TileView view_tile(const Params& p, const TokenTile& tile,
                                              int32_t tile_index, int32_t part, int32_t rank) {
  if (tile.count > C::kTokens) {
    return {.expert = tile.expert,
            .begin = tile.begin + rank * C::kTokens,
            .count = rank == 0 ? C::kTokens : tile.count - C::kTokens,
            .feature_tile = part,
            .tile_index = tile_index,
            .shares_weights = true};
  }
  const int32_t feature_tile = part * C::kCluster + rank;
  return {.expert = tile.expert,
          .begin = tile.begin,
          .count = feature_tile < p.feature_tiles ? tile.count : 0,
          .feature_tile = feature_tile,
          .tile_index = tile_index};
}

// Finds pieces of work by number; numbers must not decrease. Lane i of the warp knows tile first +
// i.
template <class C>
struct WorkFinder {
  int32_t tiles = 0;
  int32_t first = -32;
  int32_t end_of_lane = 0;  // number of pieces of all tiles up to this lane's
  int32_t end = 0;          // number of pieces of all tiles up to lane 31's

  // True if there is a piece of this number.
  __device__ __forceinline__ bool find(const Params& p, int32_t work, int32_t rank,
                                       TileView& view) {
    while (work >= end) {
      first += 32;
      if (first >= tiles) return false;
      count_pieces(p);
    }
    const uint32_t ends_after = __ballot_sync(0xffffffffu, end_of_lane > work);
    const int32_t lane = __ffs(static_cast<int>(ends_after)) - 1;
    const TokenTile tile = tile_at(p, first + lane);
    const int32_t pieces = pieces_of(p, tile.count);
    const int32_t part = work - (__shfl_sync(0xffffffffu, end_of_lane, lane) - pieces);
    view = view_tile<C>(p, tile, first + lane, part, rank);
    return true;
  }

 private:
  // The load bypasses L1, which may hold the tiles of an earlier call until the wait.
  static __device__ __forceinline__ TokenTile tile_at(const Params& p, int32_t index) {
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(p.tiles) + index);
    return {.expert = tile.x, .begin = tile.y, .count = tile.z};
  }
  static __device__ __forceinline__ int32_t pieces_of(const Params& p, int32_t count) {
    return count > C::kTokens ? p.feature_tiles : (p.feature_tiles + C::kCluster - 1) / C::kCluster;
  }
  __device__ __forceinline__ void count_pieces(const Params& p) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t pieces = first + lane < tiles ? pieces_of(p, tile_at(p, first + lane).count) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, pieces, distance);
      if (lane >= distance) pieces += before;
    }
    end_of_lane = end + pieces;
    end = __shfl_sync(0xffffffffu, end_of_lane, 31);
  }
};

// Loads both halves of 128 weight rows, or one half to both blocks of the cluster.
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

// The scale of weight block `which` (gate or up, or one of two chunks) of a tile at column block 0.
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

// Prefetches to L1 the scales of a tile's weights, which the loading warp reads one by one.
template <class C>
__device__ __forceinline__ void prefetch_weight_scales(const Params& p, const TileView& tile,
                                                       int32_t lane) {
  if constexpr (C::kBlockScales) {
    constexpr int32_t kLine = 32;  // floats
    const float* row = weight_scale_row<C>(p, tile.expert, tile.feature_tile, lane % 2);
    for (int32_t at = lane / 2 * kLine; at < p.scale_blocks; at += 16 * kLine) {
      dev::prefetch_l1(row + at);
    }
  }
}

// A cluster's pieces of work: its position gives the first; its first block draws the others from a
// counter and tells the second. A ring of kTickets needs no signal that a slot is free: the blocks
// share the ring of stages, and a ticket is drawn only when the tile before it has begun.
template <class C>
struct ClusterQueue {
  SharedStorage<C>& s;
  TicketCounter counter;
  int32_t rank;
  uint32_t drawn = 0;
  uint32_t order = 0;

  // The number of the next piece; a whole warp calls it.
  __device__ __forceinline__ int32_t next() {
    const auto slot = static_cast<int32_t>(order % C::kTickets);
    const uint32_t phase = order / C::kTickets % 2;
    if (rank == 0) {
      if (threadIdx.x % 32 == 0) {
        if (order == 0) counter.mark();
        drawn = counter.draw();
        dev::publish_to_cluster(&s.tickets[slot], drawn, &s.ticket_full[slot], 1);
      }
      drawn = __shfl_sync(0xffffffffu, drawn, 0);
    } else {
      dev::mbarrier_wait_cluster(&s.ticket_full[slot], phase);
      drawn = *static_cast<volatile uint32_t*>(&s.tickets[slot]);
    }
    ++order;
    return static_cast<int32_t>(gridDim.x / C::kCluster + drawn);
  }
  // Every piece draws one ticket, so the launch's last ticket has number `pieces` - 1.
  __device__ __forceinline__ void finish(int32_t pieces) const {
    if (order > 0 && rank == 0 && threadIdx.x % 32 == 0 &&
        drawn + 1 == static_cast<uint32_t>(pieces)) {
      counter.reset();
    }
  }
};

// True for a down product that awaits its rows tile by tile.
template <class C>
__device__ __forceinline__ bool awaits_tiles(const Params& p) {
  return C::kIsDown && p.hands_over_tiles;
}

// Lets the next kernel begin once everything before this one is done, which the next one relies on.
template <class C>
__device__ __forceinline__ void begin_next_kernel(const Params& p, int32_t lane) {
  dev::grid_dependency_wait();
  if (!C::kIsDown && p.hands_over_tiles && blockIdx.x == 0 && lane == 0) {
    *p.ended = 0;
    __threadfence();
  }
  __syncwarp();
  dev::grid_launch_dependents();
}

// Waits until up has stored all of a tile: every math warp of each block counts once per piece.
template <class C>
__device__ __forceinline__ void await_tile(const Params& p, const TileView& tile) {
  const int32_t blocks = tile.shares_weights ? C::kCluster : 1;
  const auto count = static_cast<uint32_t>(blocks * p.up_feature_tiles * (C::kMathThreads / 32));
  while (dev::load_acquire(&p.tiles[tile.tile_index].done) < count) __nanosleep(64);
  // Other blocks stored the rows through the generic proxy.
  dev::fence_proxy_async();
}

// The last block of down that awaits no more tiles resets their counts to 0.
template <class C>
__device__ __forceinline__ void end_awaiting(const Params& p) {
  if (dev::add_relaxed(p.ended, 1) + 1 != gridDim.x) return;
  for (int32_t i = 0; i < *p.num_tiles; ++i) p.tiles[i].done = 0;
}

// One warp finds the tiles of this block, one ahead of the warp that loads them. It may read them
// before the wait, because the kernel before this one has waited for the grouping.
template <class C>
__device__ void find_tiles(const Params& p, SharedStorage<C>& s) {
  const auto rank = static_cast<int32_t>(dev::cluster_rank());
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  WorkFinder<C> finder{.tiles = __ldcg(p.num_tiles)};
  ClusterQueue<C> queue{s, {p.tickets}, rank};
  auto work = static_cast<int32_t>(blockIdx.x) / C::kCluster;
  uint32_t phase = 0;
  bool found = true;
  bool first = true;
  while (found) {
    TileView tile;
    found = finder.find(p, work, rank, tile);
    if (found && tile.count > 0) {
      prefetch_weight_scales<C>(p, tile, lane);
    }
    if (!found) tile.expert = -1;
    if (lane == 0) {
      s.next = tile;
      dev::mbarrier_arrive(&s.next_full);
    }
    if (first && !awaits_tiles<C>(p)) begin_next_kernel<C>(p, lane);
    first = false;
    if (!found) break;
    dev::mbarrier_wait(&s.next_empty, phase);
    phase ^= 1;
    work = queue.next();
  }
  queue.finish(finder.end);
  if (awaits_tiles<C>(p)) {
    begin_next_kernel<C>(p, lane);
  }
}

// State of the loading warp, with its place in the ring.
template <class C>
struct StageLoader {
  const Params& p;
  const CUtensorMap* token_map;
  const CUtensorMap* weight_map;
  SharedStorage<C>& s;
  int32_t rank;
  int32_t lane;
  int32_t stage = 0;
  int32_t loaded = 0;  // stages of the first tile whose weights were requested
  Phases phases;

  __device__ __forceinline__ void await_stage() {
    dev::mbarrier_wait(&s.empty[stage], phases.of(stage) ^ 1);
    phases.flip(stage);
  }
  static __device__ __forceinline__ int32_t boxes_of(const TileView& tile) {
    return (tile.count + C::kBoxTokens - 1) / C::kBoxTokens;
  }
  static __device__ __forceinline__ uint32_t scale_bytes_of(const TileView& tile) {
    if (!C::kBlockScales || tile.count == 0) return 0;
    return static_cast<uint32_t>((tile.begin % 4 + tile.count + 3) / 4 * 16);
  }
  // One thread calls this, and load_rows.
  __device__ __forceinline__ void load_weight_boxes(const TileView& tile, int32_t step) const {
    constexpr uint32_t kWeightBytes = C::kWeightRows * C::kDepth;
    const auto token_bytes = static_cast<uint32_t>(boxes_of(tile) * C::kBoxTokens * C::kDepth);
    dev::mbarrier_expect_tx(&s.full[stage], kWeightBytes + token_bytes + scale_bytes_of(tile));
    load_weights<C>(weight_map, s, stage, step * C::kDepth, tile, rank);
  }
  // Loads the token rows and their scales.
  __device__ __forceinline__ void load_rows(const TileView& tile, int32_t step) const {
    uint64_t* full = &s.full[stage];
    const int32_t k = step * C::kDepth;
    const int32_t boxes = boxes_of(tile);
    const int32_t before = tile.begin % 4;
    const uint32_t scale_bytes = scale_bytes_of(tile);
#pragma unroll
    for (int32_t box = 0; box < C::kTokens / C::kBoxTokens; ++box) {
      const int32_t row = box * C::kBoxTokens;
      if (box >= boxes) continue;
      dev::tma_load_2d(token_map, full, s.tokens[stage] + row * C::kDepth, k, tile.begin + row);
    }
    if (scale_bytes > 0) {
      dev::bulk_load(s.info[stage].token_scale,
                     p.row_scales + step * p.group_scale_stride + (tile.begin - before),
                     scale_bytes, full);
    }
  }
  // The warp loads weights of the first tile, as many stages as the ring holds; they depend on no
  // earlier kernel.
  __device__ __forceinline__ void load_ahead(const TileView& tile, int32_t steps) {
    loaded = min(C::kStages, steps);
    for (stage = 0; stage < loaded; ++stage) {
      await_stage();
      if (lane == 0) load_weight_boxes(tile, stage);
    }
    if (C::kIsDown && lane == 0) prefetch_weights(tile, loaded, steps);
    stage = 0;
  }
  // Prefetches to L2 the weights of steps after those of load_ahead: memory would otherwise idle
  // while up's last blocks end.
  __device__ __forceinline__ void prefetch_weights(const TileView& tile, int32_t first,
                                                   int32_t steps) const {
    const int32_t end = min(steps, first + C::kStepsAhead);
    for (int32_t step = first; step < end; ++step) {
      for (int32_t half = 0; half < 2; ++half) {
        if (tile.shares_weights && half != rank) continue;
        dev::tma_prefetch_3d(weight_map, step * C::kDepth,
                             tile.feature_tile * C::kFeatures + half * (C::kWeightRows / 2),
                             tile.expert);
      }
    }
  }
  // The warp calls this. Two lanes load the scales of the weights, one step ahead.
  __device__ __forceinline__ void load_tile(const TileView& tile, int32_t steps) {
    const float* weight_scales = nullptr;
    if (C::kBlockScales && lane < 2 && tile.count > 0) {
      weight_scales = weight_scale_row<C>(p, tile.expert, tile.feature_tile, lane);
    }
    float ahead = weight_scales == nullptr ? 1 : __ldg(weight_scales);
    for (int32_t step = 0; step < steps; ++step) {
      const bool has_weights = loaded > 0;
      if (has_weights) {
        --loaded;
      } else {
        await_stage();
      }
      StageInfo& info = s.info[stage];
      if (lane == 0) {
        if (!has_weights) load_weight_boxes(tile, step);
        load_rows(tile, step);
        info.tile = tile;
      }
      if (lane < 2) info.weight_scale[lane] = ahead;
      if (weight_scales != nullptr) ahead = __ldg(weight_scales + min(step + 1, steps - 1));
      __syncwarp();
      if (lane == 0) dev::mbarrier_arrive(&s.full[stage]);
      stage = (stage + 1) % C::kStages;
    }
  }
};

// One warp loads the tiles that find_tiles gives.
template <class C>
__device__ void load_tiles(const Params& p, const CUtensorMap* token_map,
                           const CUtensorMap* weight_map, SharedStorage<C>& s) {
  const int32_t steps = (p.depth + C::kDepth - 1) / C::kDepth;
  StageLoader<C> loader{.p = p,
                        .token_map = token_map,
                        .weight_map = weight_map,
                        .s = s,
                        .rank = static_cast<int32_t>(dev::cluster_rank()),
                        .lane = static_cast<int32_t>(threadIdx.x) % 32};
  uint32_t phase = 0;
  bool first = true;
  for (;;) {
    dev::mbarrier_wait(&s.next_full, phase);
    phase ^= 1;
    const TileView tile = s.next;
    __syncwarp();
    if (first) {
      if (tile.expert >= 0) loader.load_ahead(tile, steps);
      if (!awaits_tiles<C>(p)) dev::grid_dependency_wait();
      // Earlier kernels stored the rows through the generic proxy.
      dev::fence_proxy_async();
      first = false;
    }
    if (tile.expert < 0) break;
    if (loader.lane == 0) {
      dev::mbarrier_arrive(&s.next_empty);
      if (awaits_tiles<C>(p) && tile.count > 0) await_tile<C>(p, tile);
    }
    __syncwarp();
    loader.load_tile(tile, steps);
  }
  if (awaits_tiles<C>(p) && loader.lane == 0) end_awaiting<C>(p);
  loader.await_stage();
  if (loader.lane != 0) return;
  s.info[loader.stage].tile.expert = -1;
  dev::mbarrier_arrive(&s.full[loader.stage]);
}

}  // namespace conclave::inline v0::experts::tile_fp8
