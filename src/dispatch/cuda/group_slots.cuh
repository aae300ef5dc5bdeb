// Counting sort of slots by local expert, in one block, one cluster, or a grid after a counting
// launch. Every run keeps the order of the slots: ranks come from ballots within a warp and from
// sums over warps and blocks, not from who came first.
#pragma once

#include "core/device_flow.h"
#include "cuda/device/cluster.cuh"

#include <cstdint>

namespace conclave::inline v0::dispatch::device {

struct GroupParams {
  const int32_t* topk_ids = nullptr;
  const int64_t* wide_ids = nullptr;
  int32_t* narrow_ids = nullptr;
  unsigned long long* skipped_ids = nullptr;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  const int32_t* local_expert = nullptr;
  unsigned long long* expert_load = nullptr;  // [num_counted] to add to, or null
  int32_t num_counted = 0;
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t num_local_experts = 0;
  int32_t tile_tokens = 1;
  int32_t tile_shift = 0;          // log2 of tile_tokens; -1 if it is no power of two
  int32_t skewed_tile_tokens = 0;  // for more than skewed_from tiles; 0: never
  int32_t skewed_tile_shift = 0;
  uint32_t skewed_from = 0;
  int32_t expert_bits = 0;  // bits that tell local experts apart
  int32_t* expert_begin = nullptr;
  int32_t* num_tiles = nullptr;
  int32_t* row_slot = nullptr;
  int32_t* slot_row = nullptr;
  TokenTile* tiles = nullptr;
  uint32_t* block_counts = nullptr;  // [E, blocks] if an earlier launch has counted, or null
};

// Reads the parameters that grouping needs, so that grouping does not wait for the constant cache.
// Runs before the kernel waits for an earlier one.
__device__ __forceinline__ void touch_parameters(const GroupParams& params) {
  asm volatile("" ::"l"(params.topk_ids), "l"(params.local_expert), "r"(params.num_local_experts),
               "l"(params.expert_begin), "l"(params.tiles));
}

// The cut of rows into tiles.
struct TileCut {
  uint32_t tokens;
  int32_t shift;
  bool skewed = false;

  __device__ __forceinline__ uint32_t whole(uint32_t rows) const {
    return shift >= 0 ? rows >> shift : rows / tokens;
  }
  __device__ __forceinline__ uint32_t tiles(uint32_t rows) const {
    return whole(rows + tokens - 1);
  }
};
__device__ __forceinline__ TileCut plain_cut(const GroupParams& params) {
  return {static_cast<uint32_t>(params.tile_tokens), params.tile_shift};
}
__device__ __forceinline__ TileCut skewed_cut(const GroupParams& params) {
  return {static_cast<uint32_t>(params.skewed_tile_tokens), params.skewed_tile_shift, true};
}
// Gives the same answer in all threads of all blocks, which all know the number of plain tiles.
__device__ __forceinline__ bool is_skewed(const GroupParams& params, uint32_t plain_tiles) {
  return params.skewed_tile_tokens > 0 && plain_tiles > params.skewed_from;
}
// Runs in one thread. One of the two numbers is 0: its kernel has nothing to do.
__device__ __forceinline__ void store_tile_numbers(const GroupParams& params, const TileCut& cut,
                                                   uint32_t tiles) {
  params.num_tiles[0] = cut.skewed ? 0 : static_cast<int32_t>(tiles);
  params.num_tiles[1] = cut.skewed ? static_cast<int32_t>(tiles) : 0;
}

// Destination of an expert's rows in this block.
struct alignas(16) ExpertPlace {
  uint32_t begin = 0;   // its first sorted row
  uint32_t before = 0;  // its rows in earlier blocks
  uint32_t count = 0;   // its rows in all blocks
  uint32_t first_tile = 0;
};

// Lies in group_shared_bytes() of memory: places, totals, then one row of counts per warp.
struct GroupShared {
  ExpertPlace* places;  // [E]
  uint32_t* totals;     // [E]: totals of this block, which the other blocks read
  uint32_t* counts;     // [warps, E]
};

inline constexpr uint32_t kFullWarp = 0xffffffffU;
inline constexpr int kSlotBatch = 4;  // loads in flight per lane

__device__ __forceinline__ GroupShared carve_group_shared(void* memory, int32_t experts) {
  auto* places = static_cast<ExpertPlace*>(memory);
  auto* totals = reinterpret_cast<uint32_t*>(places + experts);
  return {places, totals, totals + experts};
}

// The local expert of an id, or -1. The id is checked before it is used as an index.
__device__ __forceinline__ int32_t local_expert_of(const GroupParams& params, int32_t id) {
  if (id < 0 || id >= params.num_experts) return -1;
  const int32_t local = params.local_expert == nullptr ? id : params.local_expert[id];
  return local < params.num_local_experts ? local : -1;
}

__device__ __forceinline__ int64_t live_tokens_of(const GroupParams& params) {
  if (params.live_tokens == nullptr) return params.num_tokens;
  const int64_t live = *params.live_tokens;
  return live < 0 ? 0 : (live < params.num_tokens ? live : params.num_tokens);
}

// Origin of the ids: an earlier stage, or the caller, whose ids may be wide and are counted.
enum class Ids : uint8_t { kPlain, kGiven };
// Says whether a visit counts the ids: each id is visited twice.
enum class Notes : uint8_t { kNone, kTaken };

// A wide id that does not fit int32 has no expert, but, unlike -1, it counts as skipped.
template <Ids kIds>
__device__ __forceinline__ int32_t id_of_slot(const GroupParams& params, int64_t slot) {
  if (kIds == Ids::kPlain || params.wide_ids == nullptr) return params.topk_ids[slot];
  const int64_t id = params.wide_ids[slot];
  const auto narrow = static_cast<int32_t>(id);
  return narrow == id ? narrow : INT32_MIN;
}

// A warp's share of the slots, in order.
struct SlotRange {
  int64_t begin;
  int64_t end;
};
__device__ __forceinline__ SlotRange slots_of_warp(const GroupParams& params, uint32_t block,
                                                   uint32_t blocks) {
  const int64_t slots = live_tokens_of(params) * params.top_k;
  const int64_t warps = int64_t{blocks} * (blockDim.x / 32);
  const int64_t share = (slots + warps * 32 - 1) / (warps * 32) * 32;
  const int64_t begin = (int64_t{block} * (blockDim.x / 32) + threadIdx.x / 32) * share;
  return {begin, begin + share < slots ? begin + share : slots};
}

// Calls visit(slot, id) in every lane of the warp at once; id is -1 beyond the end.
template <Ids kIds, class Visit>
__device__ __forceinline__ void for_each_slot(const GroupParams& params, const SlotRange& range,
                                              const Visit& visit) {
  const int64_t lane = threadIdx.x % 32;
  for (int64_t base = range.begin; base < range.end; base += 32 * kSlotBatch) {
    int32_t ids[kSlotBatch];
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const int64_t slot = base + 32 * i + lane;
      ids[i] = slot < range.end ? id_of_slot<kIds>(params, slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      if (base + 32 * i < range.end) visit(base + 32 * i + lane, ids[i]);
    }
  }
}

// Runs on whole warps. One atomic per expert in the warp: a hot expert costs one, not 32.
__device__ __forceinline__ void add_load(const GroupParams& params, int32_t id) {
  const bool valid = id >= 0 && id < params.num_counted;
  const uint32_t peers = __match_any_sync(kFullWarp, valid ? id : -1);
  const bool leads = static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(peers)) - 1;
  if (valid && leads) {
    atomicAdd(params.expert_load + id, static_cast<unsigned long long>(__popc(peers)));
  }
}

// Runs on whole warps, each of which adds at most once.
__device__ __forceinline__ void count_skipped(const GroupParams& params, int32_t id) {
  const bool skipped = id < -1 || id >= params.num_experts;
  const uint32_t lanes = __ballot_sync(kFullWarp, skipped);
  if (lanes != 0 && threadIdx.x % 32 == 0) {
    atomicAdd(params.skipped_ids, static_cast<unsigned long long>(__popc(lanes)));
  }
}

// Does what else a caller wants of an id, at its first visit.
__device__ __forceinline__ void note_slot(const GroupParams& params, const SlotRange& range,
                                          int64_t slot, int32_t id) {
  if (params.expert_load != nullptr) add_load(params, id);
  if (params.skipped_ids != nullptr) count_skipped(params, id);
  if (params.narrow_ids != nullptr && slot < range.end) {
    params.narrow_ids[slot] = id >= 0 && id < params.num_experts ? id : -1;
  }
}

// Sums of integers: any order gives the same counts.
template <Ids kIds, Notes kNotes>
__device__ __forceinline__ void count_slots(const GroupParams& params, const SlotRange& range,
                                            uint32_t* counts) {
  for_each_slot<kIds>(params, range, [&](int64_t slot, int32_t id) {
    const int32_t expert = local_expert_of(params, id);
    if (expert >= 0) atomicAdd(counts + expert, 1U);
    if constexpr (kNotes == Notes::kTaken) note_slot(params, range, slot, id);
  });
}

// Turns the counts of each warp into the number of rows in earlier warps of the block.
__device__ __forceinline__ void scan_warps(const GroupShared& shared, int32_t experts) {
  const int warps = static_cast<int>(blockDim.x / 32);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    uint32_t sum = 0;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const uint32_t count = shared.counts[w * experts + e];
      shared.counts[w * experts + e] = sum;
      sum += count;
    }
    shared.totals[e] = sum;
  }
}

struct RowsAndTiles {
  uint32_t rows;
  uint32_t tiles;
};

// Sums over the threads before this one; `all` receives the sums over the block.
__device__ __forceinline__ RowsAndTiles scan_block(RowsAndTiles own, RowsAndTiles* warp_sums,
                                                   RowsAndTiles& all) {
  const uint32_t lane = threadIdx.x % 32;
  RowsAndTiles sum = own;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t rows = __shfl_up_sync(kFullWarp, sum.rows, step);
    const uint32_t tiles = __shfl_up_sync(kFullWarp, sum.tiles, step);
    if (lane >= step) {
      sum.rows += rows;
      sum.tiles += tiles;
    }
  }
  if (lane == 31) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  RowsAndTiles warp{0, 0};
  if (lane < blockDim.x / 32) warp = warp_sums[lane];
  const bool earlier = lane < threadIdx.x / 32;
  const RowsAndTiles before{__reduce_add_sync(kFullWarp, earlier ? warp.rows : 0U),
                            __reduce_add_sync(kFullWarp, earlier ? warp.tiles : 0U)};
  all = {__reduce_add_sync(kFullWarp, warp.rows), __reduce_add_sync(kFullWarp, warp.tiles)};
  return {before.rows + sum.rows - own.rows, before.tiles + sum.tiles - own.tiles};
}

// Sums over the blocks of a cluster, one thread per expert.
__device__ __forceinline__ ExpertPlace sum_cluster(const GroupShared& shared, int32_t expert,
                                                   uint32_t block, uint32_t blocks) {
  // These loads are in flight together, since each takes some 200 cycles.
  constexpr uint32_t kBatch = 8;
  ExpertPlace place;
  for (uint32_t first = 0; first < blocks; first += kBatch) {
    uint32_t totals[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      totals[i] = 0;
      if (first + i < blocks)
        totals[i] = cuda::device::load_shared_cluster(shared.totals + expert, first + i);
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      place.count += totals[i];
      place.before += first + i < block ? totals[i] : 0;
    }
  }
  return place;
}

// Sums the counts of an earlier launch, one warp per expert and four experts in flight. All threads
// may read the result after a barrier.
__device__ __forceinline__ void sum_block_counts(const GroupParams& params,
                                                 const GroupShared& shared, uint32_t block,
                                                 uint32_t blocks) {
  constexpr int32_t kBatch = 4;
  const uint32_t lane = threadIdx.x % 32;
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  for (int32_t first = warp; first < params.num_local_experts; first += kBatch * warps) {
    uint32_t all[kBatch] = {};
    uint32_t before[kBatch] = {};
    for (uint32_t b = lane; b < blocks; b += 32) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t expert = first + i * warps;
        if (expert >= params.num_local_experts) continue;
        const uint32_t count = params.block_counts[int64_t{expert} * blocks + b];
        all[i] += count;
        before[i] += b < block ? count : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t count = __reduce_add_sync(kFullWarp, all[i]);
      const uint32_t earlier = __reduce_add_sync(kFullWarp, before[i]);
      const int32_t expert = first + i * warps;
      if (lane != 0 || expert >= params.num_local_experts) continue;
      shared.places[expert].count = count;
      shared.places[expert].before = earlier;
    }
  }
}

// Fills the places of this block from the totals of all blocks; returns the cut into tiles.
__device__ __forceinline__ TileCut place_experts(const GroupParams& params,
                                                 const GroupShared& shared, uint32_t block,
                                                 uint32_t blocks) {
  __shared__ RowsAndTiles warp_sums[32];
  const auto expert = static_cast<int32_t>(threadIdx.x);
  const bool valid = expert < params.num_local_experts;
  ExpertPlace place;
  if (valid && blocks == 1) {
    place.count = shared.totals[expert];
  } else if (valid && params.block_counts != nullptr) {
    place = shared.places[expert];
  } else if (valid) {
    place = sum_cluster(shared, expert, block, blocks);
  }
  TileCut cut = plain_cut(params);
  RowsAndTiles all{};
  RowsAndTiles begin = scan_block({place.count, cut.tiles(place.count)}, warp_sums, all);
  if (is_skewed(params, all.tiles)) {
    cut = skewed_cut(params);
    __syncthreads();  // the sums of warps have been read
    begin = scan_block({place.count, cut.tiles(place.count)}, warp_sums, all);
  }
  place.begin = begin.rows;
  place.first_tile = begin.tiles;
  if (valid) shared.places[expert] = place;
  if (block != 0) return cut;
  if (valid) params.expert_begin[expert] = static_cast<int32_t>(begin.rows);
  if (threadIdx.x == 0) {
    params.expert_begin[params.num_local_experts] = static_cast<int32_t>(all.rows);
    store_tile_numbers(params, cut, all.tiles);
  }
  return cut;
}

// Only the first row of a tile writes the tile.
__device__ __forceinline__ void store_tile(const GroupParams& params, const TileCut& cut,
                                           const ExpertPlace& place, int32_t expert, uint32_t row) {
  const uint32_t index = cut.whole(row);
  if (row != index * cut.tokens) return;
  const uint32_t left = place.count - row;
  const int4 value = make_int4(expert, static_cast<int>(place.begin + row),
                               static_cast<int>(left < cut.tokens ? left : cut.tokens), 0);
  *reinterpret_cast<int4*>(params.tiles + place.first_tile + index) = value;
}

// The lanes with the same expert; none for -1. It takes one ballot per bit: match.any takes a turn
// for every value in the warp, which is three times slower at 128 experts.
__device__ __forceinline__ uint32_t lanes_of_expert(const GroupParams& params, int32_t expert) {
  uint32_t peers = __ballot_sync(kFullWarp, expert >= 0);
  for (int bit = 0; bit < params.expert_bits; ++bit) {
    const bool set = ((expert >> bit) & 1) != 0;
    const uint32_t lanes = __ballot_sync(kFullWarp, set);
    peers &= set ? lanes : ~lanes;
  }
  return expert >= 0 ? peers : 0;
}

template <Ids kIds>
__device__ __forceinline__ void place_slots(const GroupParams& params, const SlotRange& range,
                                            const GroupShared& shared, const TileCut& cut) {
  uint32_t* counts =
      shared.counts + threadIdx.x / 32 * static_cast<uint32_t>(params.num_local_experts);
  const uint32_t earlier_lanes = (1U << (threadIdx.x % 32)) - 1;
  for_each_slot<kIds>(params, range, [&](int64_t slot, int32_t id) {
    const int32_t expert = local_expert_of(params, id);
    const uint32_t peers = lanes_of_expert(params, expert);
    const auto rank = static_cast<uint32_t>(__popc(peers & earlier_lanes));
    const uint32_t first = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    if (expert >= 0 && rank == 0) counts[expert] = first + static_cast<uint32_t>(__popc(peers));
    __syncwarp();
    if (expert < 0) {
      if (slot < range.end) params.slot_row[slot] = -1;
      return;
    }
    const ExpertPlace place = shared.places[expert];
    const uint32_t row = place.before + first + rank;
    params.slot_row[slot] = static_cast<int32_t>(place.begin + row);
    params.row_slot[place.begin + row] = static_cast<int32_t>(slot);
    store_tile(params, cut, place, expert, row);
  });
}

// Clears the slots of tokens that do not count.
__device__ __forceinline__ void clear_dead_slots(const GroupParams& params, uint32_t block,
                                                 uint32_t blocks) {
  const int64_t slots = params.num_tokens * params.top_k;
  const int64_t step = int64_t{blocks} * blockDim.x;
  int64_t slot = live_tokens_of(params) * params.top_k + int64_t{block} * blockDim.x + threadIdx.x;
  for (; slot < slots; slot += step) params.slot_row[slot] = -1;
}

// Reads nothing that an earlier kernel wrote, so it need not wait for one.
__device__ __forceinline__ void clear_group_shared(const GroupShared& shared, int32_t experts) {
  const uint32_t words = blockDim.x / 32 * static_cast<uint32_t>(experts);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) shared.counts[i] = 0;
}

// Writes this block's totals for the launch that places: counts [E] of shared memory, cleared.
template <Ids kIds>
__device__ __forceinline__ void count_block(const GroupParams& params, uint32_t* counts) {
  count_slots<kIds, Notes::kNone>(params, slots_of_warp(params, blockIdx.x, gridDim.x), counts);
  __syncthreads();
  for (auto e = static_cast<int32_t>(threadIdx.x); e < params.num_local_experts;
       e += static_cast<int32_t>(blockDim.x)) {
    params.block_counts[int64_t{e} * gridDim.x + blockIdx.x] = counts[e];
  }
}

// The barrier between writing ids and group_slots in one kernel of one block or one cluster.
__device__ __forceinline__ void sync_group(uint32_t blocks) {
  if (blocks > 1) {
    cuda::device::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Runs in all threads of `blocks` blocks: one, a cluster, or a grid after count_block by as many
// blocks. It needs clear_group_shared and a barrier before it, visible ids, and at least as many
// threads per block as local experts.
template <Ids kIds>
__device__ __forceinline__ void group_slots(const GroupParams& params, const GroupShared& shared,
                                            uint32_t block, uint32_t blocks) {
  const bool clustered = blocks > 1 && params.block_counts == nullptr;
  const SlotRange range = slots_of_warp(params, block, blocks);
  constexpr Notes kNotes = kIds == Ids::kGiven ? Notes::kTaken : Notes::kNone;
  count_slots<kIds, kNotes>(
      params, range,
      shared.counts + threadIdx.x / 32 * static_cast<uint32_t>(params.num_local_experts));
  if (params.block_counts != nullptr) sum_block_counts(params, shared, block, blocks);
  __syncthreads();
  scan_warps(shared, params.num_local_experts);
  if (clustered) cuda::device::cluster_sync();
  const TileCut cut = place_experts(params, shared, block, blocks);
  __syncthreads();
  // The others' totals have been read: blocks may end after the matching wait.
  if (clustered) cuda::device::cluster_arrive();
  place_slots<kIds>(params, range, shared, cut);
  clear_dead_slots(params, block, blocks);
  if (clustered) cuda::device::cluster_wait();
}

}  // namespace conclave::inline v0::dispatch::device
