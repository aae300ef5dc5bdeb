// A whole small forward in one launch, for at most eight tokens. Weights are all that costs time:
// one warp keeps a ring of them in flight by TMA from the first instruction to the last, across the
// one grid barrier between the up and the down product. All else is repeated by every block: tables
// of experts, conversion of the rows.
//
// Products run as mma.sync with weights as the 16 rows and tokens as the 8 columns; column t is
// token t. Lane (g, q) = (lane / 4, lane % 4) reads 16 contiguous bytes of row g where the product
// wants elements 2q, 2q + 8, ...: K is permuted, alike for weights and rows. Which warp adds which
// boxes of an expert's K is fixed and experts are added in ascending order, so that a token's bits
// do not depend on the others.
//
// Codes become bf16 by a table in shared memory (codes.cuh): their boxes have 128 bytes of K too.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "experts/cuda/sm90/decode/down.cuh"
#include "experts/cuda/sm90/decode/producer.cuh"
#include "experts/cuda/sm90/decode/prologue.cuh"
#include "experts/cuda/sm90/decode/up.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// Waits for all blocks of the grid; one thread of each calls it. The word's highest bit flips each
// time and the others return to 0, so that nothing is cleared between launches, whatever their
// grids.
__device__ __forceinline__ void grid_barrier(uint32_t* word) {
  constexpr uint32_t kTurn = 0x80000000U;
  const uint32_t before = ptx::add_release(word, blockIdx.x == 0 ? kTurn - (gridDim.x - 1) : 1U);
  while (((ptx::load_acquire(word) ^ before) & kTurn) == 0) {
  }
}

__device__ __forceinline__ int live_tokens(const DecodeParams& params) {
  int64_t tokens = params.call.num_tokens;
  if (params.call.live_tokens != nullptr)
    tokens = max(int64_t{0}, min(tokens, *params.call.live_tokens));
  return static_cast<int>(tokens);
}

template <class Config>
__device__ __forceinline__ void init_barriers(const DecodeParams& params, const Shared& shared) {
  for (int i = 0; i < params.shared.stages; ++i) {
    ptx::mbarrier_init(shared.full + i, Config::kBlockScales ? 33 : 1);
    ptx::mbarrier_init(shared.empty + i, Config::kConsumerWarps);
  }
  for (int i = 0; i < kDecodeTileBuffers; ++i) {
    // Every lane arrives for what it wrote or read itself, so nothing depends on order within a
    // warp.
    ptx::mbarrier_init(shared.tile_full + i, Config::kConsumerWarps * 32);
    ptx::mbarrier_init(shared.tile_empty + i, 32);
  }
  ptx::mbarrier_init(shared.tables_ready, 32);
  ptx::mbarrier_init(shared.intermediate_ready, 1);
  ptx::fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void consume(const DecodeParams& params, const Shared& shared,
                                        const Thread& me, int tokens) {
  if constexpr (Config::kIsByte) {
    quantize_rows<Config>(params, shared, tokens);
  } else {
    if constexpr (Config::kTakesTable) fill_values<Config>(params, shared);
    convert_rows<Config>(params, shared, tokens);
  }
  consumer_sync<Config>();
  ptx::mbarrier_wait(shared.tables_ready, 0);
  const Walk walk(params, shared.tables->units);
  Ring ring;
  multiply_tiles<Config>(params, shared, me, ring);
  ptx::mbarrier_wait(shared.intermediate_ready, 0);
  run_down<Config>(params, shared, me, walk, tokens, ring);
}

template <class Config>
__device__ __forceinline__ void produce(const DecodeParams& params, const Shared& shared,
                                        const Thread& me, int tokens) {
  if (tokens * params.plan.top_k <= 32)
    make_tables_in_warp(params, *shared.tables, me.lane, tokens);
  ptx::mbarrier_arrive(shared.tables_ready);
  __syncwarp();
  const Walk walk(params, shared.tables->units);
  if (me.lane == 0) Producer<Config>{params, shared}.run(walk);
}

template <class Config>
__device__ __forceinline__ void finish(const DecodeParams& params, const Shared& shared,
                                       const Thread& me) {
  ptx::mbarrier_wait(shared.tables_ready, 0);
  finish_tiles<Config>(params, shared, me);
  // Orders the other lanes' reads of the tiles before lane 0's arrival, which racecheck does not
  // follow; if all lanes arrived, a launch would take 0.1 to 0.3 us more.
  __syncwarp();
  if (me.lane == 0) {
    uint32_t* const words = params.call.counters;
    grid_barrier(words);
    if (blockIdx.x == 0) words[kNextTileWord] = 0;
    ptx::mbarrier_arrive(shared.intermediate_ready);
    ptx::grid_launch_dependents();
  }
}

template <DecodeElement kElement>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_experts(const __grid_constant__ DecodeParams params) {
  using Config = decode::Config<kElement>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Thread me;
  const Shared shared(memory, params.shared);
  if (threadIdx.x == Config::kProducerWarp * 32) {
    ptx::prefetch_tensor_map(&params.up_map);
    ptx::prefetch_tensor_map(&params.down_map);
    init_barriers<Config>(params, shared);
  }
  if (threadIdx.x < kDecodeTileSlots) shared.tables->tiles[threadIdx.x] = kItemUnknown;
  if (threadIdx.x == 0) shared.tables->begun = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  const int tokens = live_tokens(params);
  if (tokens == 0) return;
  if (tokens * params.plan.top_k > 32) make_tables_in_block(params, *shared.tables, tokens);
  if (me.warp < Config::kConsumerWarps) {
    consume<Config>(params, shared, me, tokens);
  } else if (me.warp == Config::kProducerWarp) {
    produce<Config>(params, shared, me, tokens);
  } else if (me.warp == Config::kFinishWarp) {
    finish<Config>(params, shared, me);
  } else if (me.warp == Config::kDrawWarp) {
    ptx::mbarrier_wait(shared.tables_ready, 0);
    if (me.lane == 0) draw_tiles(params, *shared.tables, Walk(params, shared.tables->units));
  } else if constexpr (Config::kBlockScales) {
    ptx::mbarrier_wait(shared.tables_ready, 0);
    ScaleProducer{params, shared, me.lane}.run(Walk(params, shared.tables->units));
  }
}

}  // namespace conclave::inline v0::experts::decode
