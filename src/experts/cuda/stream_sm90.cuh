// Products that read their weights from memory once, for few rows an expert: weights are the M side
// of wgmma, tokens the N side. Up gathers its rows and applies the activation, down writes a row a
// slot. Per element the sum over K has one order, whatever the tile.
#pragma once

#include "activation/device/swish.cuh"
#include "core/device_flow.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wgmma.cuh"

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::stream {

enum class Side : uint8_t { kUp, kDown };

// Token rows that a kernel can multiply at once, fewest first: a tile takes the narrowest that
// holds its rows.
struct Widths {
  int of[4];
};
constexpr Widths widths(int max_tokens) {
  switch (max_tokens) {
    case 16:
      return {{8, 8, 16, 16}};
    case 32:
      return {{16, 16, 32, 32}};
    case 96:
      return {{32, 64, 80, 96}};
    case 160:
      return {{64, 96, 128, 160}};
    default:
      return {{max_tokens / 4, max_tokens / 2, max_tokens / 4 * 3, max_tokens}};
  }
}

// A block a multiprocessor: two warpgroups multiply 64 or 128 weight rows each, a third fills the
// ring. The ring is as deep as shared memory allows: a multiprocessor must keep 64 KiB of weights
// in flight for its share of the memory's rate. With many rows an expert, what counts is how often
// L2 hands out the same token: 256 weight rows a block halve that.
template <class Element_, int kMaxTokens_, int kWeightRows_, int kAtoms_, int kStages_>
struct Config {
  using Element = Element_;
  static constexpr int kMaxTokens = kMaxTokens_;
  static constexpr Widths kWidths = widths(kMaxTokens);
  static constexpr int kWeightRows = kWeightRows_;
  static constexpr int kSlices = kWeightRows / 128;  // of 64 rows, a warpgroup
  // A stage is this many pieces of 128 bytes of K: neighbours in memory are asked for together.
  static constexpr int kAtoms = kAtoms_;
  static constexpr int kStages = kStages_;
  static constexpr int kAtomBytes = 128;
  static constexpr int kAtomDepth = kAtomBytes / static_cast<int>(sizeof(Element));
  static constexpr int kDepth = kAtoms * kAtomDepth;
  static constexpr int kWeightBytes = kWeightRows * kAtomBytes;  // of an atom
  static constexpr int kTokenBytes = kMaxTokens * kAtomBytes;
  // Rows of a TMA box of tokens; a tile takes as many boxes as its rows need.
  static constexpr int kTokenBox = kMaxTokens < 64 ? 16 : 32;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kGatherWarps = 3;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kGatherWarps);
  // 384 threads have 168 registers each; accumulators beyond 128 need what the producers spare.
  static constexpr bool kMovesRegisters = kMaxTokens / 2 * kSlices > 112;
  static constexpr uint32_t kConsumerRegisters = 232;
  static constexpr uint32_t kProducerRegisters = 40;
  // Stages that a gather has issued before it reports one: their copies are in flight together.
  static constexpr int kGatherLag = kStages > 4 ? 3 : kStages - 2;
  static_assert(kMaxTokens % kTokenBox == 0 && kGatherLag > 0 && kWeightRows % 128 == 0);
};

template <class Config>
struct SharedStorage {
  // 1024: the atom of the 128-byte swizzle.
  alignas(1024) uint8_t weights[Config::kStages][Config::kAtoms][Config::kWeightBytes];
  alignas(1024) uint8_t tokens[Config::kStages][Config::kAtoms][Config::kTokenBytes];
  alignas(16) uint8_t scratch[Config::kConsumerWarps][512];
  int32_t source_rows[Config::kGatherWarps][Config::kMaxTokens];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
};

struct Params {
  CUtensorMap weights;  // up with a gate: {K, 8, 2, I / 8, E}; else {K, rows, E}
  CUtensorMap rows;     // down: the intermediate {I, rows}
  const TokenTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  const int32_t* row_slot = nullptr;
  int32_t top_k = 1;
  const void* input = nullptr;  // up: token rows
  int64_t input_stride = 0;     // elements
  const float* bias = nullptr;  // [E, 2I], [E, I] or [E, H]; or null
  const float* input_weights = nullptr;
  void* output = nullptr;  // up: [sorted rows, stride]; down: [slots, stride]
  int64_t output_stride = 0;
  int32_t features = 0;  // of an output row: I or H
  int32_t feature_tiles = 0;
  int32_t depth = 0;         // K in elements
  int32_t depth_stages = 0;  // K in stages
  bool wide_stores = true;   // output rows are 16-byte aligned
  activation::DeviceActivation activation;
};

struct RingPosition {
  int32_t slot = 0;
  uint32_t phase = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Past L1: down may read this before its wait, when all of up's blocks have waited for the
// grouping.
__device__ __forceinline__ TokenTile read_tile(const Params& params, int32_t item, int32_t items) {
  if (item >= items) return {};
  const int4 tile =
      __ldcg(reinterpret_cast<const int4*>(params.tiles) + item / params.feature_tiles);
  return {.expert = tile.x, .begin = tile.y, .count = tile.z, .reserved = 0};
}

__device__ __forceinline__ int32_t count_items(const Params& params) {
  return __ldcg(params.num_tiles) * params.feature_tiles;
}

// ---- producer: weights, and for down the rows of the intermediate, by one thread

template <class Config, Side kSide>
__device__ __forceinline__ void load_weights(const Params& params, SharedStorage<Config>& shared,
                                             int32_t slot, int32_t expert, int32_t feature_tile,
                                             int32_t stage) {
#pragma unroll
  for (int atom = 0; atom < Config::kAtoms; ++atom) {
    const int32_t k = stage * Config::kDepth + atom * Config::kAtomDepth;
    if (kSide == Side::kUp && params.activation.gated) {
      cuda::device::tma_load_5d(&params.weights, &shared.full[slot], shared.weights[slot][atom], k,
                                0, 0, feature_tile * (Config::kWeightRows / 16), expert,
                                cuda::device::CacheHint::kEvictFirst);
    } else {
      cuda::device::tma_load_3d(&params.weights, &shared.full[slot], shared.weights[slot][atom], k,
                                feature_tile * Config::kWeightRows, expert,
                                cuda::device::CacheHint::kEvictFirst);
    }
  }
}

template <class Config>
__device__ __forceinline__ int32_t token_boxes(int32_t count) {
  return (count + Config::kTokenBox - 1) / Config::kTokenBox;
}

template <class Config, Side kSide>
__device__ __forceinline__ void expect_stage(SharedStorage<Config>& shared, int32_t slot,
                                             int32_t count) {
  uint32_t bytes = Config::kAtoms * Config::kWeightBytes;
  if constexpr (kSide == Side::kDown) {
    bytes += token_boxes<Config>(count) * Config::kTokenBox * Config::kAtoms * Config::kAtomBytes;
  }
  cuda::device::mbarrier_arrive_expect_tx(&shared.full[slot], bytes);
}

template <class Config>
__device__ __forceinline__ void load_rows(const Params& params, SharedStorage<Config>& shared,
                                          int32_t slot, const TokenTile& tile, int32_t stage) {
  constexpr int32_t kBoxBytes = Config::kTokenBox * Config::kAtomBytes;
  for (int32_t box = 0; box < token_boxes<Config>(tile.count); ++box) {
#pragma unroll
    for (int atom = 0; atom < Config::kAtoms; ++atom) {
      cuda::device::tma_load_2d(
          &params.rows, &shared.full[slot], shared.tokens[slot][atom] + box * kBoxBytes,
          stage * Config::kDepth + atom * Config::kAtomDepth, tile.begin + box * Config::kTokenBox,
          cuda::device::CacheHint::kEvictLast);
    }
  }
}

template <class Config, Side kSide>
__device__ __forceinline__ void produce(const Params& params, SharedStorage<Config>& shared) {
  int32_t ahead = 0;
  int32_t item = static_cast<int32_t>(blockIdx.x);
  if constexpr (kSide == Side::kUp) {
    cuda::device::grid_dependency_wait();
    cuda::device::grid_launch_dependents();
  }
  const int32_t items = count_items(params);
  TokenTile tile = read_tile(params, item, items);
  if constexpr (kSide == Side::kDown) {
    // Weights do not depend on the up product: the ring fills while its last blocks still run.
    if (item < items) {
      ahead = min(Config::kStages, params.depth_stages);
      for (int32_t stage = 0; stage < ahead; ++stage) {
        expect_stage<Config, kSide>(shared, stage, tile.count);
        load_weights<Config, kSide>(params, shared, stage, tile.expert, item % params.feature_tiles,
                                    stage);
      }
    }
    cuda::device::grid_dependency_wait();
    cuda::device::grid_launch_dependents();
  }
  RingPosition ring;
  while (item < items) {
    const int32_t feature_tile = item % params.feature_tiles;
    item += static_cast<int32_t>(gridDim.x);
    const TokenTile next = read_tile(params, item, items);
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      if (ahead > 0) {
        --ahead;
      } else {
        cuda::device::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
        expect_stage<Config, kSide>(shared, ring.slot, tile.count);
        load_weights<Config, kSide>(params, shared, ring.slot, tile.expert, feature_tile, stage);
      }
      if constexpr (kSide == Side::kDown) load_rows<Config>(params, shared, ring.slot, tile, stage);
      ring.template advance<Config::kStages>();
    }
    tile = next;
  }
}

// ---- producer: the token rows of up, gathered by three warps

// Each warp keeps the source rows of the whole tile, so that warps need not wait for each other.
template <class Config>
__device__ __forceinline__ void find_source_rows(const Params& params, int32_t* source_rows,
                                                 const TokenTile& tile) {
  __syncwarp();
  for (int32_t r = static_cast<int32_t>(threadIdx.x % 32); r < tile.count; r += 32) {
    source_rows[r] = params.row_slot[tile.begin + r] / params.top_k;
  }
  __syncwarp();
}

// An atom of each row from column `column` on, swizzled as TMA would; zeros beyond the row's end.
template <class Config>
__device__ __forceinline__ void gather_atom(const Params& params, const int32_t* source_rows,
                                            uint32_t destination, int32_t count, int32_t column,
                                            int32_t first_row) {
  using Element = typename Config::Element;
  constexpr auto kSize = static_cast<int32_t>(sizeof(Element));
  const int32_t chunk = static_cast<int32_t>(threadIdx.x % 8);
  column += chunk * 16 / kSize;
  const int32_t bytes = max(0, min(16, (params.depth - column) * kSize));
  const auto* input = static_cast<const Element*>(params.input) + (bytes > 0 ? column : 0);
  for (int32_t r = first_row; r < count; r += 4 * Config::kGatherWarps) {
    const uint32_t address = destination + r * Config::kAtomBytes + ((chunk ^ (r & 7)) << 4);
    cuda::device::cp_async_16_part(address, input + source_rows[r] * params.input_stride, bytes);
  }
}

template <class Config>
__device__ __forceinline__ void gather_stage(const Params& params, const int32_t* source_rows,
                                             SharedStorage<Config>& shared, int32_t slot,
                                             int32_t count, int32_t stage, int32_t first_row) {
#pragma unroll
  for (int atom = 0; atom < Config::kAtoms; ++atom) {
    gather_atom<Config>(params, source_rows,
                        cuda::device::shared_address(shared.tokens[slot][atom]), count,
                        stage * Config::kDepth + atom * Config::kAtomDepth, first_row);
  }
  cuda::device::cp_async_commit_group();
}

// The copies were made by ordinary stores: this thread's are handed to wgmma, then the warp
// reports.
__device__ __forceinline__ void report_gathered(uint64_t* full) {
  cuda::device::fence_proxy_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) cuda::device::mbarrier_arrive(full);
}

template <class Config>
__device__ __forceinline__ void gather(const Params& params, SharedStorage<Config>& shared,
                                       int32_t warp) {
  cuda::device::grid_dependency_wait();
  const int32_t items = count_items(params);
  const int32_t first_row = 4 * warp + static_cast<int32_t>(threadIdx.x % 32) / 8;
  int32_t* source_rows = shared.source_rows[warp];
  RingPosition ring;
  RingPosition reported;
  int32_t pending = 0;
  for (int32_t item = static_cast<int32_t>(blockIdx.x); item < items;
       item += static_cast<int32_t>(gridDim.x)) {
    const TokenTile tile = read_tile(params, item, items);
    find_source_rows<Config>(params, source_rows, tile);
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      cuda::device::mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
      gather_stage<Config>(params, source_rows, shared, ring.slot, tile.count, stage, first_row);
      ring.template advance<Config::kStages>();
      if (++pending <= Config::kGatherLag) continue;
      --pending;
      cuda::device::cp_async_wait_group<Config::kGatherLag>();
      report_gathered(&shared.full[reported.slot]);
      reported.template advance<Config::kStages>();
    }
  }
  cuda::device::cp_async_wait_group<0>();
  for (; pending > 0; --pending) {
    report_gathered(&shared.full[reported.slot]);
    reported.template advance<Config::kStages>();
  }
}

// ---- consumer

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  static constexpr int kSlices = Config::kSlices;
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;

  const Params& params;
  SharedStorage<Config>& shared;
  RingPosition ring;
  int32_t warp;  // of the consumers
  int32_t lane;

  __device__ __forceinline__ Consumer(const Params& p, SharedStorage<Config>& s)
      : params(p),
        shared(s),
        warp(static_cast<int32_t>(threadIdx.x / 32)),
        lane(static_cast<int32_t>(threadIdx.x % 32)) {}

  __device__ __forceinline__ void release(int32_t slot) {
    if (lane == 0) cuda::device::mbarrier_arrive(&shared.empty[slot]);
  }

  template <int N>
  __device__ __forceinline__ void multiply_atom(float (&d)[kSlices][N / 2], int atom) const {
    const uint64_t a = cuda::device::wgmma_descriptor_128b(
        cuda::device::shared_address(shared.weights[ring.slot][atom]) +
        warp / 4 * (Config::kWeightBytes / 2));
    const uint64_t b = cuda::device::wgmma_descriptor_128b(
        cuda::device::shared_address(shared.tokens[ring.slot][atom]));
#pragma unroll
    for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        // Descriptors count in 16 bytes: 32 of K, 64 rows.
        cuda::device::Wgmma<Element, N>::mma(d[slice], a + 2 * k + 512 * slice, b + 2 * k, true);
      }
    }
  }

  // d = the weight rows of this warpgroup, 64 a slice, times N tokens, over all of K.
  template <int N>
  __device__ __forceinline__ void multiply(float (&d)[kSlices][N / 2]) {
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.0F;
    int32_t previous = 0;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      cuda::device::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      cuda::device::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) multiply_atom<N>(d, atom);
      cuda::device::wgmma_commit_group();
      if (stage > 0) {
        cuda::device::wgmma_wait_group<1>();
        release(previous);
      }
      previous = ring.slot;
      ring.template advance<Config::kStages>();
    }
    cuda::device::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      cuda::device::wgmma_fence_operand(d[i / (N / 2)][i % (N / 2)]);
    }
    release(previous);
  }

  // Times the weight of the row's slot, in place.
  template <int N>
  __device__ __forceinline__ void weigh(float (&d)[N / 2], const TokenTile& tile) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int32_t token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float weight = 0.0F;
      if (token < tile.count) {
        weight = params.input_weights[params.row_slot[tile.begin + token]];
      }
      d[i / 2 * 4 + i % 2] *= weight;
      d[i / 2 * 4 + i % 2 + 2] *= weight;
    }
  }

  template <int N>
  __device__ __forceinline__ void add_bias(float (&d)[N / 2], float first, float second) const {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      d[4 * j] += first;
      d[4 * j + 1] += first;
      d[4 * j + 2] += second;
      d[4 * j + 3] += second;
    }
  }

  // d[4j], d[4j + 1]: the activation of gate (there) and up (d[4j + 2], d[4j + 3]).
  template <int N>
  __device__ __forceinline__ void activate_gated(float (&d)[N / 2]) const {
    namespace device = activation::device;
    const activation::DeviceActivation& act = params.activation;
    if (device::is_swish(act)) {
      const float limit = act.parameters.limit;
      const float alpha = act.parameters.alpha;
      const float beta = device::swish_beta(act);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        d[4 * j] = device::swish(d[4 * j], d[4 * j + 2], limit, alpha, beta);
        d[4 * j + 1] = device::swish(d[4 * j + 1], d[4 * j + 3], limit, alpha, beta);
      }
      return;
    }
    // Rare formulas: a copy in local memory, so that their code is there once.
    float copy[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) copy[i] = d[i];
#pragma unroll 1
    for (int i = 0; i < N / 4; ++i) {
      const int at = i / 2 * 4 + i % 2;
      copy[at] = device::apply(act, copy[at], copy[at + 2]);
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      d[4 * j] = copy[4 * j];
      d[4 * j + 1] = copy[4 * j + 1];
    }
  }

  template <int N>
  __device__ __forceinline__ void activate_plain(float (&d)[N / 2]) const {
    float copy[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) copy[i] = d[i];
#pragma unroll 1
    for (int i = 0; i < N / 2; ++i) {
      copy[i] = activation::device::apply(params.activation, 0.0F, copy[i]);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = copy[i];
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    Pair pair;
    if constexpr (std::is_same_v<Element, __half>) {
      pair = __floats2half2_rn(low, high);
    } else {
      pair = __floats2bfloat162_rn(low, high);
    }
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  // Eight features of a row; the last ones of a row may be fewer.
  __device__ __forceinline__ void store_eight(int64_t row, int32_t feature, uint4 values) const {
    auto* output = static_cast<Element*>(params.output) + row * params.output_stride + feature;
    if (params.wide_stores && feature + 8 <= params.features) {
      *reinterpret_cast<uint4*>(output) = values;
      return;
    }
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      if (feature + i < params.features) reinterpret_cast<uint16_t*>(output)[i] = bits;
    }
  }

  // Eight features (d[4j], d[4j + 1]) of each row of the intermediate.
  template <int N>
  __device__ __forceinline__ void store_gated(const float (&d)[N / 2], const TokenTile& tile,
                                              int32_t feature) const {
    const uint32_t scratch = cuda::device::shared_address(shared.scratch[warp]) + lane * 16;
#pragma unroll
    for (int first = 0; first < N; first += 32) {
      uint32_t packed[4] = {};
#pragma unroll
      for (int j = 0; j < 4 && first + 8 * j < N; ++j) {
        packed[j] = pack(d[first / 2 + 4 * j], d[first / 2 + 4 * j + 1]);
      }
      __syncwarp();
      cuda::device::stmatrix_x4_trans(scratch, packed[0], packed[1], packed[2], packed[3]);
      __syncwarp();
      const int32_t token = first + lane;
      if (token < tile.count && feature < params.features) {
        const uint4 values = *reinterpret_cast<const uint4*>(shared.scratch[warp] + lane * 16);
        store_eight(tile.begin + token, feature, values);
      }
    }
  }

  // Sixteen features of each row: 16 rows at a time, two lanes a row. `slots`: the output row of
  // token 32 i + lane.
  template <int N>
  __device__ __forceinline__ void store_plain(const float (&d)[N / 2], int32_t count,
                                              int32_t feature,
                                              const int32_t (&slots)[(N + 31) / 32]) const {
    const uint32_t scratch = cuda::device::shared_address(shared.scratch[warp]) +
                             (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int first = 0; first < N; first += 16) {
      const int i = first / 2;
      uint32_t packed[4] = {};
      packed[0] = pack(d[i], d[i + 1]);
      packed[1] = pack(d[i + 2], d[i + 3]);
      if constexpr (N > 8) {
        packed[2] = pack(d[i + 4], d[i + 5]);
        packed[3] = pack(d[i + 6], d[i + 7]);
      }
      const int32_t slot = __shfl_sync(0xffffffff, slots[first / 32], first % 32 + lane / 2);
      __syncwarp();
      cuda::device::stmatrix_x4_trans(scratch, packed[0], packed[1], packed[2], packed[3]);
      __syncwarp();
      const int32_t at = feature + lane % 2 * 8;
      if (first + lane / 2 < count && at < params.features) {
        const uint4 values = *reinterpret_cast<const uint4*>(shared.scratch[warp] + lane * 16);
        store_eight(slot, at, values);
      }
    }
  }

  __device__ __forceinline__ float bias_of(int64_t index, int32_t feature) const {
    return params.bias != nullptr && feature < params.features ? params.bias[index] : 0.0F;
  }

  // First feature of this warp in a slice; a warp of a slice has 8 features with a gate, else 16.
  __device__ __forceinline__ int32_t first_feature(int32_t feature_tile, int slice,
                                                   int32_t features_of_warp) const {
    const int32_t slices = 2 * kSlices;
    const int32_t warps = (feature_tile * slices + warp / 4 * kSlices + slice) * 4 + warp % 4;
    return warps * features_of_warp;
  }

  template <int N>
  __device__ __forceinline__ void run_gated(const TokenTile& tile, int32_t feature_tile) {
    float gate_bias[kSlices];
    float up_bias[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own = first_feature(feature_tile, slice, 8) + lane / 4;
      const int64_t gate = int64_t{tile.expert} * 2 * params.features + own;
      gate_bias[slice] = bias_of(gate, own);
      up_bias[slice] = bias_of(gate + params.features, own);
    }
    float d[kSlices][N / 2];
    multiply<N>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (params.input_weights != nullptr) weigh<N>(d[slice], tile);
      add_bias<N>(d[slice], gate_bias[slice], up_bias[slice]);
      activate_gated<N>(d[slice]);
      store_gated<N>(d[slice], tile, first_feature(feature_tile, slice, 8));
    }
  }

  // Down, and up without a gate.
  template <int N, Side kSide>
  __device__ __forceinline__ void run_plain(const TokenTile& tile, int32_t feature_tile) {
    float low_bias[kSlices];
    float high_bias[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int32_t own = first_feature(feature_tile, slice, 16) + lane / 4;
      const int64_t row = int64_t{tile.expert} * params.features + own;
      low_bias[slice] = bias_of(row, own);
      high_bias[slice] = bias_of(row + 8, own + 8);
    }
    int32_t slots[(N + 31) / 32];
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) {
      const int32_t token = 32 * i + lane;
      slots[i] = 0;
      if (token < tile.count) {
        slots[i] = kSide == Side::kDown ? params.row_slot[tile.begin + token] : tile.begin + token;
      }
    }
    float d[kSlices][N / 2];
    multiply<N>(d);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if constexpr (kSide == Side::kUp) {
        if (params.input_weights != nullptr) weigh<N>(d[slice], tile);
      }
      add_bias<N>(d[slice], low_bias[slice], high_bias[slice]);
      if constexpr (kSide == Side::kUp) activate_plain<N>(d[slice]);
      store_plain<N>(d[slice], tile.count, first_feature(feature_tile, slice, 16), slots);
    }
  }

  template <int N, Side kSide>
  __device__ __forceinline__ void run_tile(const TokenTile& tile, int32_t feature_tile) {
    if constexpr (kSide == Side::kUp) {
      if (params.activation.gated) {
        run_gated<N>(tile, feature_tile);
        return;
      }
    }
    run_plain<N, kSide>(tile, feature_tile);
  }

  template <Side kSide>
  __device__ __forceinline__ void run_narrowest(const TokenTile& tile, int32_t feature_tile) {
    constexpr Widths kWidths = Config::kWidths;
    if (tile.count <= kWidths.of[0]) {
      run_tile<kWidths.of[0], kSide>(tile, feature_tile);
    } else if (kWidths.of[1] > kWidths.of[0] && tile.count <= kWidths.of[1]) {
      run_tile<kWidths.of[1], kSide>(tile, feature_tile);
    } else if (kWidths.of[3] > kWidths.of[2] && tile.count <= kWidths.of[2]) {
      run_tile<kWidths.of[2], kSide>(tile, feature_tile);
    } else {
      run_tile<kWidths.of[3], kSide>(tile, feature_tile);
    }
  }

  template <Side kSide>
  __device__ __forceinline__ void run() {
    cuda::device::grid_dependency_wait();
    const int32_t items = count_items(params);
    int32_t item = static_cast<int32_t>(blockIdx.x);
    TokenTile tile = read_tile(params, item, items);
    while (item < items) {
      const int32_t feature_tile = item % params.feature_tiles;
      item += static_cast<int32_t>(gridDim.x);
      const TokenTile next = read_tile(params, item, items);
      run_narrowest<kSide>(tile, feature_tile);
      tile = next;
    }
  }
};

template <class Config, Side kSide>
__device__ __forceinline__ void prepare(const Params& params, SharedStorage<Config>& shared) {
  if (threadIdx.x == 0) {
    cuda::device::prefetch_tensor_map(&params.weights);
    if constexpr (kSide == Side::kDown) cuda::device::prefetch_tensor_map(&params.rows);
    for (int32_t stage = 0; stage < Config::kStages; ++stage) {
      cuda::device::mbarrier_init(&shared.full[stage],
                                  kSide == Side::kUp ? 1 + Config::kGatherWarps : 1);
      cuda::device::mbarrier_init(&shared.empty[stage], Config::kConsumerWarps);
    }
    cuda::device::fence_mbarrier_init();
  }
  __syncthreads();
}

template <class Config, Side kSide>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  prepare<Config, kSide>(params, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (warp < Config::kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) {
      cuda::device::setmaxnreg_inc<Config::kConsumerRegisters>();
    }
    Consumer<Config>(params, shared).template run<kSide>();
    return;
  }
  if constexpr (Config::kMovesRegisters) {
    cuda::device::setmaxnreg_dec<Config::kProducerRegisters>();
  }
  if (warp == Config::kConsumerWarps) {
    if (cuda::device::elect_one()) produce<Config, kSide>(params, shared);
  } else if constexpr (kSide == Side::kUp) {
    gather<Config>(params, shared, warp - Config::kConsumerWarps - 1);
  }
}

}  // namespace conclave::inline v0::experts::stream
