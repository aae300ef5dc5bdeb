// Grouped products of e4m3 codes with many rows per expert, sm_90a.
//
// A block computes 128 token rows x 256 weight rows. Tokens are the M side of wgmma: each of two
// math warpgroups has 64 of them. Weight rows are the N side, in two chunks of 128: the wgmma of a
// chunk fill 64 registers over 128 columns of K, then are promoted into the chunk's 64 float32
// sums, so that 256 weight rows need 192 registers. A gated tile is 128 features: exactly one block
// of weight scales each for gate and up, and one group of the intermediate's scales.
// A third warpgroup loads: tokens by cp.async through the permutation (or a TMA box where rows are
// dense), weights by TMA, scales by cp.async.
// Two blocks form a cluster and take a token tile of up to 256 rows: of more than 128 each takes a
// half, and each loads half of the weights for both; of fewer both take all rows, and each has
// other weight rows. L2 feeds 32 KiB a stage and block then, not 48.
#pragma once

#include "activation/device/formulas.cuh"
#include "activation/device/swish.cuh"
#include "core/device_flow.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/fp8_math.cuh"

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>

namespace conclave::inline v0::experts::tile_fp8 {

namespace dev = cuda::device;

enum class Product : uint8_t {
  kGated,  // weight rows 8 gate, 8 up, 8 gate...
  kPlain,  // an up product without a gate
  kDown,
};
enum class Scaling : uint8_t {
  kBlock,  // weights 128x128, tokens 1x128
  kRow,    // a scale a weight row, one a token row
};

struct Params {
  // Tokens. Gathered: row_slot[r] / top_k is a row of `rows`; otherwise sorted rows through a map.
  const uint8_t* rows = nullptr;
  int64_t row_stride = 0;  // bytes
  const float* row_scales = nullptr;
  int64_t row_scale_stride = 0;           // between token rows
  int64_t group_scale_stride = 0;         // between groups of K
  const float* constant_scale = nullptr;  // kRow: [1] of every token, instead of row_scales
  int32_t depth = 0;                      // K
  // Weights.
  const float* weight_scales = nullptr;
  int64_t expert_scale_stride = 0;
  int64_t half_scale_stride = 0;  // gate to up
  int32_t scale_blocks = 0;       // kBlock: along K
  const float* bias = nullptr;    // [E, 2I], [E, I] or [E, H], or null
  int32_t features = 0;           // I or H: rows of one half
  // Rows and tiles.
  const int32_t* row_slot = nullptr;
  const TokenTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  int32_t top_k = 1;
  int32_t feature_tiles = 0;
  const float* input_weights = nullptr;  // per slot, of up products; or null
  // Results. kDown: bf16 rows by slot. Else codes with scales, or float32 rows, by sorted row.
  void* output = nullptr;
  int64_t output_stride = 0;       // elements
  float* output_scales = nullptr;  // [groups of I, output_scale_stride]
  int64_t output_scale_stride = 0;
  const float* output_constant_scale = nullptr;  // kRow: codes with this step; null: float32 rows
  bool power_of_two = false;
  activation::DeviceActivation activation;
};

template <Product kProductOf, Scaling kScalingOf, bool kWholeRoundsOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr Scaling kScaling = kScalingOf;
  // K is a whole number of rounds over the ring: see multiply_tile.
  static constexpr bool kWholeRounds = kWholeRoundsOf;
  static constexpr bool kGathers = kProduct != Product::kDown;
  static constexpr bool kBlockScales = kScaling == Scaling::kBlock;
  static constexpr int kCluster = 2;
  static constexpr int kTokens = 128;  // of a block
  static constexpr int kWeightRows = 256;
  static constexpr int kFeatures = kProduct == Product::kGated ? 128 : 256;
  static constexpr int kDepth = 128;  // bytes and elements
  static constexpr int kStages = 4;   // 4 x 48 KiB of the 227
  static constexpr int kMathThreads = 256;
  static constexpr int kLoadThreads = 128;
  static constexpr int kThreads = kMathThreads + kLoadThreads;
  // 256 x 224 + 128 x 56 = 64512 of 65536. 192 of 224 are sums and the running chunk.
  static constexpr int kMathRegisters = 224;
  static constexpr int kLoadRegisters = 56;
  static_assert(kMathThreads * kMathRegisters + kLoadThreads * kLoadRegisters <= 65536);
};

struct StageInfo {
  float token_scale[128];
  float weight_scale[2];
  int32_t expert;  // negative: there is no more work
  int32_t begin;
  int32_t count;
  int32_t feature_tile;
  int32_t padding[2];
};

template <class C>
struct SharedStorage {
  alignas(1024) uint8_t tokens[C::kStages][C::kTokens * C::kDepth];
  alignas(1024) uint8_t weights[C::kStages][C::kWeightRows * C::kDepth];
  StageInfo info[C::kStages];
  float scratch[16][C::kMathThreads];  // of formulas that are not unrolled
  uint64_t full[C::kStages];
  uint64_t empty[C::kStages];
};

// The phase of each stage of the ring is a bit.
struct Phases {
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t of(int32_t stage) const { return (bits >> stage) & 1; }
  __device__ __forceinline__ void flip(int32_t stage) { bits ^= 1U << stage; }
};

// A block's part of a piece of work: what both of its sides agree on.
struct TileView {
  int32_t expert = 0;
  int32_t begin = 0;
  int32_t count = 0;  // 0: nothing, beside a block that has rows
  int32_t feature_tile = 0;
  bool shares_weights = false;  // with the other block of the cluster
};

// Producer -------------------------------------------------------------------------------------

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

// Consumer -------------------------------------------------------------------------------------

// sums[i] += part[i] * scale of its row and its gate or up column.
template <class C>
__device__ __forceinline__ void promote(float (&sums)[64], const float (&part)[64],
                                        const float (&token_scale)[2], float even, float odd) {
  if constexpr (C::kBlockScales) {
    const float s00 = token_scale[0] * even;
    const float s01 = token_scale[0] * odd;
    const float s10 = token_scale[1] * even;
    const float s11 = token_scale[1] * odd;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float upper = j % 2 == 0 ? s00 : s01;
      const float lower = j % 2 == 0 ? s10 : s11;
      sums[4 * j] = fmaf(part[4 * j], upper, sums[4 * j]);
      sums[4 * j + 1] = fmaf(part[4 * j + 1], upper, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(part[4 * j + 2], lower, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(part[4 * j + 3], lower, sums[4 * j + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] += part[i];
  }
}

// A math warp's view of the ring.
template <class C>
struct RingView {
  SharedStorage<C>& s;
  uint32_t empty_of_peer = 0;
  bool signals = false;  // one lane of the warp
  Phases phases;

  __device__ __forceinline__ explicit RingView(SharedStorage<C>& storage) : s(storage) {
    empty_of_peer = dev::map_to_block(dev::shared_address(s.empty), dev::cluster_rank() ^ 1);
    signals = threadIdx.x % 32 == 0;
  }
  __device__ __forceinline__ void wait(int32_t stage) const {
    dev::mbarrier_wait(&s.full[stage], phases.of(stage));
  }
  // To both producers: each may write weights into this block.
  __device__ __forceinline__ void release(int32_t stage) {
    phases.flip(stage);
    __syncwarp();
    if (signals) {
      dev::mbarrier_arrive(&s.empty[stage]);
      dev::mbarrier_arrive_relaxed(empty_of_peer + stage * 8);
    }
  }
};

template <class C>
__device__ __forceinline__ void start_chunk(uint32_t tokens, uint32_t weights, float (&part)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) dev::wgmma_fence_operand(part[i]);
  dev::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // 32 bytes: 2 in units of a descriptor
    dev::Wgmma<__nv_fp8_e4m3, 128>::mma(part, dev::wgmma_descriptor_of_low(tokens + 2 * k),
                                        dev::wgmma_descriptor_of_low(weights + 2 * k), k > 0);
  }
  dev::wgmma_commit_group();
#pragma unroll
  for (int i = 0; i < 64; ++i) dev::wgmma_fence_operand(part[i]);
}
__device__ __forceinline__ void finish_chunk(float (&part)[64]) {
  dev::wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 64; ++i) dev::wgmma_fence_operand(part[i]);
}

template <class C, int kWarpgroup>
__device__ __forceinline__ void multiply_stage(RingView<C>& ring, int stage, int32_t row,
                                               float (&sums)[2][64]) {
  constexpr bool kGated = C::kProduct == Product::kGated;
  constexpr int32_t kChunk = 128 * C::kDepth / 16;
  const uint32_t tokens = dev::wgmma_descriptor_low(dev::shared_address(ring.s.tokens[stage])) +
                          kWarpgroup * (64 * C::kDepth / 16);
  const uint32_t weights = dev::wgmma_descriptor_low(dev::shared_address(ring.s.weights[stage]));
  float part[64];
  ring.wait(stage);
  // cp.async writes as ordinary stores do; wgmma reads as the copy engine does.
  if constexpr (C::kGathers) dev::fence_proxy_async_shared();
  start_chunk<C>(tokens, weights, part);
  float token_scale[2] = {1, 1};
  float weight_scale[2] = {1, 1};
  if constexpr (C::kBlockScales) {
    const StageInfo& info = ring.s.info[stage];
    token_scale[0] = info.token_scale[row];
    token_scale[1] = info.token_scale[row + 8];
    weight_scale[0] = info.weight_scale[0];
    weight_scale[1] = info.weight_scale[1];
  }
  finish_chunk(part);
  promote<C>(sums[0], part, token_scale, weight_scale[0], weight_scale[kGated ? 1 : 0]);
  start_chunk<C>(tokens, weights + kChunk, part);
  finish_chunk(part);
  ring.release(stage);
  promote<C>(sums[1], part, token_scale, weight_scale[kGated ? 0 : 1], weight_scale[1]);
}

// Epilogue -------------------------------------------------------------------------------------

// Register i of lane q of a quad becomes register q of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                               uint32_t& r3) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool high = threadIdx.x % 4 >= 2;
  uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? r0 : r1, 1);
  uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? r2 : r3, 1);
  (odd ? r0 : r1) = a;
  (odd ? r2 : r3) = b;
  a = __shfl_xor_sync(0xffffffffu, high ? r0 : r2, 2);
  b = __shfl_xor_sync(0xffffffffu, high ? r1 : r3, 2);
  (high ? r0 : r2) = a;
  (high ? r1 : r3) = b;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The two numbers of this thread's columns of accumulator pair j of chunk c: of a scale or bias row
// of the expert, `half` apart for gate and up. 0 beyond the features.
template <class C>
__device__ __forceinline__ float2 of_columns(const TileView& tile, const float* rows, int64_t half,
                                             int32_t features, int c, int j) {
  constexpr bool kGated = C::kProduct == Product::kGated;
  const int32_t feature = tile.feature_tile * C::kFeatures +
                          (kGated ? c * 64 + (j / 2) * 8 : c * 128 + j * 8) +
                          2 * (static_cast<int32_t>(threadIdx.x) % 4);
  const float* row = rows + (kGated && j % 2 == 1 ? half : 0);
  return make_float2(feature < features ? row[feature] : 0,
                     feature + 1 < features ? row[feature + 1] : 0);
}

// Keeps the compiler from hoisting loads of all columns, or keeping all their predicates: the sums
// leave no registers for them.
__device__ __forceinline__ void forget(int32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// What the main loop left out: row_factor (the input's weight, in row form also the token's scale),
// in row form the scale of the weight row, the bias.
template <class C>
__device__ __forceinline__ void scale_and_bias(const Params& p, const TileView& tile,
                                               const float (&row_factor)[2], float (&sums)[2][64]) {
  if (C::kBlockScales && p.bias == nullptr && p.input_weights == nullptr) return;
  constexpr bool kGated = C::kProduct == Product::kGated;
  const float* scales = p.weight_scales + tile.expert * p.expert_scale_stride;
  const float* biases = p.bias + int64_t{tile.expert} * p.features * (kGated ? 2 : 1);
  int32_t features = p.features;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j % 4 == 0) forget(features);
      float2 scale = make_float2(1, 1);
      float2 bias = make_float2(0, 0);
      if constexpr (!C::kBlockScales) {
        scale = of_columns<C>(tile, scales, p.half_scale_stride, features, c, j);
      }
      if (p.bias != nullptr) bias = of_columns<C>(tile, biases, p.features, features, c, j);
      sums[c][4 * j] = fmaf(sums[c][4 * j], row_factor[0] * scale.x, bias.x);
      sums[c][4 * j + 1] = fmaf(sums[c][4 * j + 1], row_factor[0] * scale.y, bias.y);
      sums[c][4 * j + 2] = fmaf(sums[c][4 * j + 2], row_factor[1] * scale.x, bias.x);
      sums[c][4 * j + 3] = fmaf(sums[c][4 * j + 3], row_factor[1] * scale.y, bias.y);
    }
  }
}

// bf16 pairs of one row: pair j is columns 8 j + 2 (lane % 4) of `kPairs` x 8 from `column`.
template <int kPairs>
__device__ __forceinline__ void store_bf16_row(__nv_bfloat16* row, int32_t column, int32_t columns,
                                               bool aligned, uint32_t (&pairs)[kPairs]) {
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % 4;
  if (aligned && column + kPairs * 8 <= columns) {
#pragma unroll
    for (int b = 0; b < kPairs; b += 4) {
      transpose_quad(pairs[b], pairs[b + 1], pairs[b + 2], pairs[b + 3]);
      if (row != nullptr) {
        *reinterpret_cast<uint4*>(row + column + 8 * (b + quad)) =
            make_uint4(pairs[b], pairs[b + 1], pairs[b + 2], pairs[b + 3]);
      }
    }
    return;
  }
  if (row == nullptr) return;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&pairs[j]);
    const int32_t first = column + 8 * j + 2 * quad;
    if (first < columns) row[first] = pair.x;
    if (first + 1 < columns) row[first + 1] = pair.y;
  }
}

template <class C>
__device__ __forceinline__ void store_down(const Params& p, const TileView& tile,
                                           const int32_t (&slot)[2], float (&sums)[2][64]) {
  auto* output = static_cast<__nv_bfloat16*>(p.output);
  const bool aligned = p.output_stride % 8 == 0 && reinterpret_cast<uintptr_t>(output) % 16 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* row = slot[half] < 0 ? nullptr : output + slot[half] * p.output_stride;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t pairs[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        pairs[j] = pack_bf16(sums[c][4 * j + 2 * half], sums[c][4 * j + 2 * half + 1]);
      }
      store_bf16_row(row, tile.feature_tile * 256 + c * 128, p.features, aligned, pairs);
    }
  }
}

// Formulas other than swish: 16 sums at a time through shared memory, so that one copy of each
// formula does for all registers.
template <class C>
__device__ __forceinline__ void activate_any(const Params& p, float (&scratch)[16][256],
                                             float (&sums)[2][64]) {
  constexpr bool kGated = C::kProduct == Product::kGated;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; i += 16) {
#pragma unroll
      for (int n = 0; n < 16; ++n) scratch[n][threadIdx.x] = sums[c][i + n];
#pragma unroll 1
      for (int n = 0; n < 16; n += 1) {
        if (kGated && n / 4 % 2 == 1) continue;
        float& value = scratch[n][threadIdx.x];
        const float up = kGated ? scratch[n + 4][threadIdx.x] : value;
        value = activation::device::apply(p.activation, value, up);
      }
#pragma unroll
      for (int n = 0; n < 16; ++n) sums[c][i + n] = scratch[n][threadIdx.x];
    }
  }
}

// silu(g) u of two gates with one reciprocal: 1/a = b / (a b). The MUFU pipe is what limits it.
__device__ __forceinline__ void silu_pair(float& g0, float& g1, float u0, float u1) {
  constexpr float kMinusLog2E = -1.44269504F;
  // Below -43 the product of two divisors could overflow; the result is under 2^-56 u there.
  g0 = dev::max_or_nan(g0, -43.0F);
  g1 = dev::max_or_nan(g1, -43.0F);
  const float a = 1.0F + dev::ex2(g0 * kMinusLog2E);
  const float b = 1.0F + dev::ex2(g1 * kMinusLog2E);
  const float inverse = dev::rcp(a * b);
  g0 = g0 * (inverse * b) * u0;
  g1 = g1 * (inverse * a) * u1;
}

__device__ __forceinline__ void activate_silu(float (&sums)[2][64]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      if (i / 4 % 2 == 1) continue;
      silu_pair(sums[c][i], sums[c][i + 1], sums[c][i + 4], sums[c][i + 5]);
    }
  }
}

// Of a gated tile, activated values lie where the gate was.
template <class C>
__device__ __forceinline__ void activate(const Params& p, float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  if (C::kProduct == Product::kPlain || !activation::device::is_swish(p.activation)) {
    activate_any<C>(p, scratch, sums);
    return;
  }
  if (p.activation.id == activation::ActivationId::kSilu) {
    activate_silu(sums);
    return;
  }
  const float limit = p.activation.parameters.limit;
  const float alpha = p.activation.parameters.alpha;
  const float beta = activation::device::swish_beta(p.activation);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 % 2 == 1) continue;
      sums[c][i] = activation::device::swish(sums[c][i], sums[c][i + 4], limit, alpha, beta);
    }
  }
}

// Value `n` (0 or 1) of feature group g of a group of 128 features, of row half `half`.
template <class C>
__device__ __forceinline__ float& activated(float (&sums)[2][64], int block, int g, int half,
                                            int n) {
  if constexpr (C::kProduct == Product::kGated) {
    return sums[g / 8][8 * (g % 8) + 2 * half + n];
  } else {
    return sums[block][4 * g + 2 * half + n];
  }
}

// 128 codes of one row, 32 of them in this thread, as four stores of 16 bytes by the quad.
template <class C>
__device__ __forceinline__ void store_codes(const Params& p, float (&sums)[2][64], int block,
                                            int half, float inverse_scale, uint8_t* row,
                                            int32_t column) {
  uint32_t words[8];
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const uint32_t low = pack_e4m3(activated<C>(sums, block, 2 * m, half, 0) * inverse_scale,
                                   activated<C>(sums, block, 2 * m, half, 1) * inverse_scale);
    const uint32_t high = pack_e4m3(activated<C>(sums, block, 2 * m + 1, half, 0) * inverse_scale,
                                    activated<C>(sums, block, 2 * m + 1, half, 1) * inverse_scale);
    words[m] = low | high << 16;
  }
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
  for (int h = 0; h < 8; h += 4) {
    transpose_quad(words[h], words[h + 1], words[h + 2], words[h + 3]);
    const int32_t first = column + 16 * h + 16 * quad;
    // The stride of a row is I rounded up to 16: whole stores stay inside it.
    if (row != nullptr && first < p.output_stride) {
      *reinterpret_cast<uint4*>(row + first) =
          make_uint4(__byte_perm(words[h], words[h + 1], 0x5410),
                     __byte_perm(words[h + 2], words[h + 3], 0x5410),
                     __byte_perm(words[h], words[h + 1], 0x7632),
                     __byte_perm(words[h + 2], words[h + 3], 0x7632));
    }
  }
}

// 128 values of one row: by pairs, 32 bytes a quad. I is rounded up to 16 in the stride.
template <class C>
__device__ __forceinline__ void store_f32_row(const Params& p, float (&sums)[2][64], int block,
                                              int half, float* row, int32_t column) {
  if (row == nullptr) return;
  const int32_t first = column + 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (first + 8 * g >= p.output_stride) break;
    *reinterpret_cast<float2*>(row + first + 8 * g) =
        make_float2(activated<C>(sums, block, g, half, 0), activated<C>(sums, block, g, half, 1));
  }
}

// Values beyond I are 0, so that they neither raise a scale nor leave rubbish in a row's padding.
template <class C>
__device__ __forceinline__ void clear_beyond(const Params& p, const TileView& tile,
                                             float (&sums)[2][64]) {
  if ((tile.feature_tile + 1) * C::kFeatures <= p.features) return;
  const int32_t quad_column = 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
  for (int block = 0; block < C::kFeatures / 128; ++block) {
#pragma unroll
    for (int g = 0; g < 16; ++g) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t feature =
            tile.feature_tile * C::kFeatures + block * 128 + 8 * g + quad_column + n % 2;
        if (feature >= p.features) activated<C>(sums, block, g, n / 2, n % 2) = 0;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ float quad_amax(float (&sums)[2][64], int block, int half) {
  float amax = 0;
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    amax = fmaxf(amax, fabsf(activated<C>(sums, block, g, half, 0)));
    amax = fmaxf(amax, fabsf(activated<C>(sums, block, g, half, 1)));
  }
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  return fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
}

// Codes of one row and 128 features, with their scale where it is dynamic.
template <class C>
__device__ __forceinline__ void quantize_row(const Params& p, int32_t sorted_row, int32_t column,
                                             int block, int half, float constant_scale,
                                             float (&sums)[2][64]) {
  const bool stored = sorted_row >= 0;
  float scale = constant_scale;
  if constexpr (C::kBlockScales) {
    scale = group_scale(quad_amax<C>(sums, block, half), p.power_of_two);
    if (stored && threadIdx.x % 4 == 0 && column < p.features) {
      p.output_scales[(column / 128) * p.output_scale_stride + sorted_row] = scale;
    }
  }
  uint8_t* row = stored ? static_cast<uint8_t*>(p.output) + sorted_row * p.output_stride : nullptr;
  store_codes<C>(p, sums, block, half, 1.0F / scale, row, column);
}

template <class C>
__device__ __forceinline__ void store_up(const Params& p, const TileView& tile,
                                         const int32_t (&sorted_row)[2], float (&scratch)[16][256],
                                         float (&sums)[2][64]) {
  activate<C>(p, scratch, sums);
  clear_beyond<C>(p, tile, sums);
  const int32_t column = tile.feature_tile * C::kFeatures;
  if (!C::kBlockScales && p.output_constant_scale == nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sorted_row[half] < 0
                       ? nullptr
                       : static_cast<float*>(p.output) + sorted_row[half] * p.output_stride;
#pragma unroll
      for (int block = 0; block < C::kFeatures / 128; ++block) {
        store_f32_row<C>(p, sums, block, half, row, column + block * 128);
      }
    }
    return;
  }
  const float constant_scale = C::kBlockScales ? 1.0F : *p.output_constant_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < C::kFeatures / 128; ++block) {
      quantize_row<C>(p, sorted_row[half], column + block * 128, block, half, constant_scale, sums);
    }
  }
}

// The two rows of a math thread; negative: none. Slots are fetched before the main loop, which
// hides their latency.
struct RowsOfThread {
  int32_t sorted[2] = {-1, -1};
  int32_t slot[2] = {-1, -1};
};

template <class C>
__device__ __forceinline__ RowsOfThread rows_of_thread(const Params& p, const TileView& tile,
                                                       int32_t row) {
  constexpr bool kDown = C::kProduct == Product::kDown;
  RowsOfThread rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= tile.count) continue;
    rows.sorted[half] = tile.begin + row + 8 * half;
    if (kDown || !C::kBlockScales || p.input_weights != nullptr) {
      rows.slot[half] = p.row_slot[rows.sorted[half]];
    }
  }
  return rows;
}

template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, const TileView& tile,
                                            const RowsOfThread& rows, float (&scratch)[16][256],
                                            float (&sums)[2][64]) {
  float row_factor[2] = {1, 1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.sorted[half] < 0) continue;
    if constexpr (!C::kBlockScales) {
      const int32_t token = C::kGathers ? rows.slot[half] / p.top_k : rows.sorted[half];
      row_factor[half] = p.constant_scale != nullptr ? *p.constant_scale
                                                     : p.row_scales[token * p.row_scale_stride];
    }
    if (C::kProduct != Product::kDown && p.input_weights != nullptr) {
      row_factor[half] *= p.input_weights[rows.slot[half]];
    }
  }
  scale_and_bias<C>(p, tile, row_factor, sums);
  if constexpr (C::kProduct == Product::kDown) {
    store_down<C>(p, tile, rows.slot, sums);
  } else {
    store_up<C>(p, tile, rows.sorted, scratch, sums);
  }
}

// Where K is a whole number of rounds, every tile begins at stage 0 and the loop over stages is
// unrolled: with constant stages, descriptors stay in uniform registers, and the products of a
// chunk are issued back to back. 4 % faster than the other loop.
template <class C, int kWarpgroup>
__device__ __forceinline__ void multiply_tile(RingView<C>& ring, int32_t first, int32_t steps,
                                              int32_t row, float (&sums)[2][64]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i / 64][i % 64] = 0;
  if constexpr (C::kWholeRounds) {
    for (int32_t round = 0; round < steps; round += C::kStages) {
#pragma unroll
      for (int stage = 0; stage < C::kStages; ++stage) {
        multiply_stage<C, kWarpgroup>(ring, stage, row, sums);
      }
    }
  } else {
    for (int32_t step = 0; step < steps; ++step) {
      multiply_stage<C, kWarpgroup>(ring, (first + step) % C::kStages, row, sums);
    }
  }
}

template <class C>
__device__ void consume(const Params& p, SharedStorage<C>& s) {
  // The shuffle tells the compiler that it is the same for a warp.
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 128, 0);
  const int32_t row =
      static_cast<int32_t>(threadIdx.x) / 32 * 16 + static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t steps = (p.depth + C::kDepth - 1) / C::kDepth;
  RingView<C> ring(s);
  int32_t first = 0;
  for (;; first = (first + steps) % C::kStages) {
    ring.wait(first);
    const StageInfo& info = s.info[first];
    const TileView tile{.expert = info.expert,
                        .begin = info.begin,
                        .count = info.count,
                        .feature_tile = info.feature_tile};
    if (tile.expert < 0) return;
    if (warpgroup * 64 >= tile.count) {  // no row of this tile is in this half
      for (int32_t step = 0; step < steps; ++step) {
        const int32_t stage = (first + step) % C::kStages;
        ring.wait(stage);
        ring.release(stage);
      }
      continue;
    }
    const RowsOfThread rows = rows_of_thread<C>(p, tile, row);
    float sums[2][64];
    if (warpgroup == 0) {
      multiply_tile<C, 0>(ring, first, steps, row, sums);
    } else {
      multiply_tile<C, 1>(ring, first, steps, row, sums);
    }
    finish_tile<C>(p, tile, rows, s.scratch, sums);
  }
}

// Kernel ---------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    tile_fp8_kernel(const __grid_constant__ CUtensorMap token_map,
                    const __grid_constant__ CUtensorMap weight_map,
                    const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<SharedStorage<C>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      dev::mbarrier_init(&s.full[i], C::kLoadThreads + 1);
      dev::mbarrier_init(&s.empty[i], C::kCluster * C::kMathThreads / 32);
    }
    dev::fence_mbarrier_init();
    dev::prefetch_tensor_map(&weight_map);
    if constexpr (!C::kGathers) dev::prefetch_tensor_map(&token_map);
  }
  dev::cluster_sync();
  dev::grid_dependency_wait();
  dev::grid_launch_dependents();
  if (threadIdx.x >= C::kMathThreads) {
    dev::setmaxnreg_dec<C::kLoadRegisters>();
    if constexpr (!C::kGathers) dev::fence_proxy_async();
    produce<C>(p, &token_map, &weight_map, s);
  } else {
    dev::setmaxnreg_inc<C::kMathRegisters>();
    consume<C>(p, s);
  }
  // The other block may still arrive at barriers of this one.
  __syncwarp();
  dev::cluster_sync();
}

}  // namespace conclave::inline v0::experts::tile_fp8
