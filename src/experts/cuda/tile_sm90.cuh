// Grouped products for many rows an expert: tokens are the M side of wgmma, weights the N side.
//
// A block is persistent: warpgroup 0 loads, warpgroups 1 and 2 multiply. Tile i of the walk is
// `kTokens` sorted rows of one expert times `kFeatures` weight rows. Cooperative: both warpgroups
// share a tile, one half of its rows each. Ping-pong: they take tiles in turn, so that one stores
// while the other multiplies.
#pragma once

#include "activation/device/formulas.cuh"
#include "core/device_flow.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/tile_sm90_params.h"

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::tile_sm90 {

using namespace cuda::device;  // NOLINT: kernels only

template <class ElementType, Product product, Shape shape, Formulas formulas = Formulas::kCommon>
struct Config {
  using Element = ElementType;
  static constexpr Product kProduct = product;
  static constexpr Shape kShape = shape;
  static constexpr Formulas kFormulas = formulas;
  static constexpr bool kUpProduct = product != Product::kDown;
  static constexpr bool kPingPong = shape.schedule == Schedule::kPingPong;
  static constexpr int kTokens = shape.tokens;
  static constexpr int kFeatures = shape.features;
  static constexpr int kStages = shape.stages;
  static constexpr int kCluster = shape.cluster;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerWarps = 8;
  // wgmma's M is 64: blocks of 64 rows that one warpgroup has of a tile.
  static constexpr int kRowBlocks = kTokens / (kPingPong ? 64 : 128);
  static constexpr int kAccumulators = kFeatures / 2;
  static constexpr int kDepth = 64;  // elements of K a stage: 128 bytes, the widest swizzle
  static constexpr int kRowBytes = 128;
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kFeatureBytes = kFeatures * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kFeatureBytes;
  // 16 rows of 256 bytes a warp, on their way from registers to whole lines of global memory.
  static constexpr int kStagingBytes = 4096;
  // Gathering keeps a pointer a row and thread; the consumers get the rest of 64 Ki registers.
  static constexpr uint32_t kProducerRegisters = kUpProduct ? 56 : 24;
  static constexpr uint32_t kConsumerRegisters = kUpProduct ? 224 : 240;
  // Warps that release a stage: of one warpgroup or of both, in every block of the cluster.
  static constexpr uint32_t kReleases = (kPingPong ? 4 : 8) * kCluster;
  // The thread that starts copies, and the four warps that gather.
  static constexpr uint32_t kFills = kUpProduct ? 5 : 1;
  // Output columns of a tile, and of one pass through the staging rows.
  static constexpr int kColumns = product == Product::kUpGated ? kFeatures / 2 : kFeatures;
  static constexpr int kPasses = kColumns > 128 ? 2 : 1;
  static constexpr int kPassColumns = kColumns / kPasses;

  static_assert(kTokens % (kPingPong ? 64 : 128) == 0 && kFeatures % 64 == 0);
  static_assert(kRowBlocks * kAccumulators <= 192, "accumulators of a thread");
  static_assert(kFeatures % (16 * kCluster) == 0 && kPassColumns % 16 == 0);
};

template <class Config>
struct SharedStorage {
  // 1024: the period of the 128-byte swizzle.
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
  alignas(1024) uint8_t features[Config::kStages][Config::kFeatureBytes];
  alignas(1024) uint8_t staging[Config::kConsumerWarps][Config::kStagingBytes];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
};

// Position in the ring of stages; `phase` flips on every turn.
template <int kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance_by(int32_t count) {
    const int32_t to = stage + count;
    phase ^= static_cast<uint32_t>(to / kStages) & 1;
    stage = to % kStages;
  }
};

struct Work {
  TokenTile tile;
  int32_t feature_tile = 0;
  bool shared = false;  // the other block of the cluster multiplies the same weights
  bool valid = false;
};

// The order of tiles: groups of token tiles; in a group all token tiles of a feature tile, then the
// next feature tile. What runs at one time then shares its rows and its weights in L2. A cluster
// takes pairs of neighbouring token tiles.
template <class Config>
struct TileWalk {
  const Params& params;
  int32_t num_tiles;
  int32_t index;  // of this block's (cluster's) work, in steps of the grid
  int32_t step;

  __device__ explicit TileWalk(const Params& p)
      : params(p),
        num_tiles(*p.num_tiles),
        index(static_cast<int32_t>(blockIdx.x) / Config::kCluster),
        step(static_cast<int32_t>(gridDim.x) / Config::kCluster) {}

  __device__ __forceinline__ Work next() {
    Work work;
    const int32_t units = (num_tiles + Config::kCluster - 1) / Config::kCluster;
    const int32_t of_group = params.group * params.feature_tiles;
    const int32_t group = index / of_group;
    const int32_t first = group * params.group;
    if (first >= units) return work;
    const int32_t width = min(params.group, units - first);
    const int32_t within = index - group * of_group;
    work.feature_tile = within / width;
    if (work.feature_tile >= params.feature_tiles) return work;
    work.valid = true;
    const int32_t unit = first + within - work.feature_tile * width;
    index += step;
    if constexpr (Config::kCluster == 1) {
      work.tile = load(unit);
    } else {
      const int32_t rank = static_cast<int32_t>(cluster_rank());
      const int32_t mine = 2 * unit + rank;
      work.tile = load(min(mine, num_tiles - 1));
      const TokenTile other = load(min(mine ^ 1, num_tiles - 1));
      work.shared = work.tile.expert == other.expert;
      if (mine >= num_tiles) work.tile.count = 0;  // only keeps its partner company
    }
    return work;
  }

  __device__ __forceinline__ TokenTile load(int32_t position) const {
    const int4 raw = __ldg(reinterpret_cast<const int4*>(params.tiles) + position);
    return {raw.x, raw.y, raw.z, 0};
  }
};

// ---- Producer ---------------------------------------------------------------------------------

// One thread: the weights of a stage. `stage_bytes` is all that will land in this block.
template <class Config>
__device__ __forceinline__ void load_features(const Params& params, SharedStorage<Config>& shared,
                                              int32_t stage, const Work& work, int32_t k,
                                              uint32_t stage_bytes) {
  uint64_t* full = &shared.full[stage];
  mbarrier_arrive_expect_tx(full, stage_bytes);
  constexpr int32_t kBoxRows = Config::kFeatures / Config::kCluster;
  const int32_t row = work.feature_tile * Config::kFeatures;
  const auto load = [&](int32_t part, auto... multicast) {
    uint8_t* destination = shared.features[stage] + part * kBoxRows * Config::kRowBytes;
    const int32_t first = row + part * kBoxRows;
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
  if constexpr (Config::kCluster == 1) {
    load(0);
  } else if (work.shared) {
    load(static_cast<int32_t>(cluster_rank()), true);
  } else {
    load(0);
    load(1);
  }
}

// The up product: four warps gather token rows by cp.async while one of their threads has the
// weights copied. A stage's rows are announced when they have landed, a few stages later.
template <class Config>
struct GatherProducer {
  static constexpr int kRowsEach = Config::kTokens / 16;
  static constexpr int kLag = 2;
  static_assert(kLag < Config::kStages);

  const Params& params;
  SharedStorage<Config>& shared;
  RingPosition<Config::kStages> position;
  int32_t announced = 0;  // stage that is announced next
  int32_t pending = 0;    // stages under way

  __device__ __forceinline__ void announce() {
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.full[announced]);
    announced = announced + 1 == Config::kStages ? 0 : announced + 1;
    --pending;
  }

  __device__ __forceinline__ void announce_all() {
    cp_async_wait_group<0>();
    while (pending > 0) announce();
  }

  __device__ __forceinline__ void wait_for_room() {
    uint64_t* empty = &shared.empty[position.stage];
    if (__all_sync(0xffffffff, mbarrier_try_wait(empty, position.phase ^ 1))) return;
    announce_all();  // consumers may be waiting for these
    mbarrier_wait(empty, position.phase ^ 1);
  }

  __device__ __forceinline__ void run() {
    using Element = typename Config::Element;
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    const int32_t row0 = thread / 8;
    const int32_t chunk = thread % 8;
    // The swizzle: chunk c of row r lies at c ^ (r % 8); rows 16 apart have the same one.
    const uint32_t offset =
        static_cast<uint32_t>(row0 * Config::kRowBytes + ((chunk ^ (row0 % 8)) * 16));
    const uint32_t base = shared_address(shared.tokens[0]) + offset;
    TileWalk<Config> walk(params);
    for (Work work = walk.next(); work.valid; work = walk.next()) {
      const Element* rows[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int32_t row = min(row0 + 16 * i, max(work.tile.count - 1, 0));
        const auto slot = static_cast<uint32_t>(__ldg(params.row_slot + work.tile.begin + row));
        const uint32_t token = slot / static_cast<uint32_t>(params.top_k);
        rows[i] = static_cast<const Element*>(params.input) +
                  static_cast<int64_t>(token) * params.input_stride + chunk * 8;
      }
      for (int32_t k = 0; k < params.depth; k += Config::kDepth) {
        wait_for_room();
        if (thread == 0) {
          load_features<Config>(params, shared, position.stage, work, k, Config::kFeatureBytes);
        }
        __syncwarp();
        const uint32_t to = base + static_cast<uint32_t>(position.stage * Config::kTokenBytes);
        const int32_t left = max(0, min(8, params.depth - k - chunk * 8));
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          if (row0 + 16 * i < work.tile.count) {
            cp_async_16_part(to + i * 16 * Config::kRowBytes, rows[i] + (left > 0 ? k : 0),
                             left * 2);
          }
        }
        cp_async_commit_group();
        ++pending;
        if (pending > kLag) {
          cp_async_wait_group<kLag>();
          announce();
        }
        position.advance();
      }
    }
    announce_all();
  }
};

// The down product: one thread has both operands copied.
template <class Config>
__device__ __forceinline__ void produce_down(const Params& params, SharedStorage<Config>& shared) {
  RingPosition<Config::kStages> position;
  TileWalk<Config> walk(params);
  for (Work work = walk.next(); work.valid; work = walk.next()) {
    const int32_t boxes = (work.tile.count + 63) / 64;
    const auto bytes =
        static_cast<uint32_t>(Config::kFeatureBytes + boxes * 64 * Config::kRowBytes);
    for (int32_t k = 0; k < params.depth; k += Config::kDepth) {
      mbarrier_wait(&shared.empty[position.stage], position.phase ^ 1);
      load_features<Config>(params, shared, position.stage, work, k, bytes);
      for (int32_t box = 0; box < boxes; ++box) {
        tma_load_2d(&params.intermediate, &shared.full[position.stage],
                    shared.tokens[position.stage] + box * 64 * Config::kRowBytes, k,
                    work.tile.begin + box * 64);
      }
      position.advance();
    }
  }
}

// ---- Consumer ---------------------------------------------------------------------------------

template <class Config>
using Accumulators = float[Config::kRowBlocks][Config::kAccumulators];

template <class Config>
__device__ __forceinline__ void release(SharedStorage<Config>& shared, int32_t stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < Config::kCluster) mbarrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

// The product of kBlocks blocks of 64 rows. One group of wgmma stays in flight; the stage before it
// goes back to the producer.
template <class Config, int kBlocks>
__device__ __forceinline__ void multiply(SharedStorage<Config>& shared, int32_t first_row,
                                         int32_t num_stages,
                                         RingPosition<Config::kStages>& position,
                                         Accumulators<Config>& sums) {
  const uint64_t tokens =
      wgmma_descriptor_128b(shared_address(shared.tokens[0]) + first_row * Config::kRowBytes);
  const uint64_t features = wgmma_descriptor_128b(shared_address(shared.features[0]));
  constexpr uint64_t kBlockStep = 64 * Config::kRowBytes / 16;
  int32_t previous = 0;
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.stage], position.phase);
    const uint64_t a = tokens + static_cast<uint32_t>(position.stage * (Config::kTokenBytes / 16));
    const uint64_t b =
        features + static_cast<uint32_t>(position.stage * (Config::kFeatureBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Wgmma<typename Config::Element, Config::kFeatures>::mma(
            sums[block], a + block * kBlockStep + step * 2, b + step * 2, step > 0 || i > 0);
      }
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (i > 0) release<Config>(shared, previous);
    previous = position.stage;
    position.advance();
  }
  wgmma_wait_group<0>();
  release<Config>(shared, previous);
}

// A warpgroup without rows in this tile only hands the stages back.
template <class Config>
__device__ __forceinline__ void pass_by(SharedStorage<Config>& shared, int32_t num_stages,
                                        RingPosition<Config::kStages>& position) {
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.stage], position.phase);
    release<Config>(shared, position.stage);
    position.advance();
  }
}

// ---- Epilogue ---------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t pack(__nv_bfloat16 /*type*/, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ __forceinline__ uint32_t pack(__half /*type*/, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// Staging rows of 256 bytes, chunks of 16 bytes swizzled against bank conflicts.
__device__ __forceinline__ uint32_t staging_offset(int32_t row, int32_t chunk) {
  return static_cast<uint32_t>(row * 256 + (chunk ^ (row % 8)) * 16);
}

// Two neighbouring blocks of 8 columns of a warp's 16 rows: v[0], v[1] columns 2 q, + 1 of row g of
// the first, v[2], v[3] of row g + 8, v[4..7] the second; lane = 4 g + q.
template <class Element>
__device__ __forceinline__ void stage_columns(uint32_t staging, int32_t chunk,
                                              const float (&v)[8]) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t row = lane % 16;
  const uint32_t address = staging + staging_offset(row, chunk + lane / 16);
  stmatrix_x4(address, pack(Element{}, v[0], v[1]), pack(Element{}, v[2], v[3]),
              pack(Element{}, v[4], v[5]), pack(Element{}, v[6], v[7]));
}

// What a warp stores of its 16 rows.
struct RowTarget {
  int32_t rows = 0;    // that exist, 0 to 16
  int32_t row = 0;     // lane l < 16: where row l goes
  int32_t column = 0;  // first column of the pass
  int32_t weigh = 0;   // lane l < 16: slot of row l
  int32_t expert = 0;
};

// kPassColumns columns of staged rows to global memory, 16 bytes a lane.
template <class Config>
__device__ __forceinline__ void store_rows(const Params& params, uint32_t staging,
                                           const RowTarget& target) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kPassColumns / 8;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  Element* output = static_cast<Element*>(params.output);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    const int32_t item = 32 * i + lane;
    const int32_t row = item / kChunks;
    const int32_t chunk = item % kChunks;
    const int32_t to = __shfl_sync(0xffffffff, target.row, row);
    const int32_t column = target.column + chunk * 8;
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(staging + staging_offset(row, chunk)));
    const int32_t left = params.columns - column;
    if (row >= target.rows || left <= 0) continue;
    Element* destination = output + static_cast<int64_t>(to) * params.output_stride + column;
    if (params.whole_chunks && (left >= 8 || Config::kUpProduct)) {
      *reinterpret_cast<uint4*>(destination) = value;
    } else {
      const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int element = 0; element < 8; ++element) {
        const auto bits = static_cast<uint16_t>(words[element / 2] >> (16 * (element % 2)));
        if (element < left) reinterpret_cast<uint16_t*>(destination)[element] = bits;
      }
    }
  }
  __syncwarp();
}

__device__ __forceinline__ float bias_at(const float* bias, int32_t column, int32_t columns) {
  return column < columns ? __ldg(bias + column) : 0.0F;
}

// The activation of 64 accumulator columns: 32 features of a gated product, 64 of another. `v` is
// overwritten with the results in the order of stage_columns.
template <class Config>
struct ActivateColumns {
  static constexpr bool kGated = Config::kProduct == Product::kUpGated;
  const Params& params;
  float (&v)[32];
  uint32_t staging;
  int32_t chunk;  // of the first result

  template <class Formula>
  __device__ __forceinline__ void visit() const {
    const activation::FormulaParameters& p = params.activation.parameters;
    constexpr int kStep = kGated ? 16 : 8;
#pragma unroll
    for (int first = 0; first < 32; first += kStep) {
      float result[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (kGated) {
          const int at = first + (i / 4) * 8 + i % 4;
          result[i] = Formula::apply(v[at], v[at + 4], p);
        } else {
          result[i] = Formula::apply(0.0F, v[first + i], p);
        }
      }
      stage_columns<typename Config::Element>(staging, chunk + 2 * first / kStep, result);
    }
  }
};

// Router weight of the input and bias of 64 accumulator columns, of which the first is
// weight row 8 * `block`.
template <class Config>
__device__ __forceinline__ void weigh_and_bias(const Params& params, const float (&weights)[2],
                                               int32_t expert, int32_t block, float (&v)[32]) {
  constexpr bool kGated = Config::kProduct == Product::kUpGated;
  const int32_t pair = 2 * static_cast<int32_t>(threadIdx.x % 4);
  const int64_t width = kGated ? 2 * static_cast<int64_t>(params.columns) : params.columns;
  const float* bias = params.bias == nullptr ? nullptr : params.bias + expert * width;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float add[2] = {0.0F, 0.0F};
    if (bias != nullptr) {
      const float* part = kGated && j % 2 == 1 ? bias + params.columns : bias;
      const int32_t column = (kGated ? (block + j) / 2 : block + j) * 8 + pair;
      add[0] = bias_at(part, column, params.columns);
      add[1] = bias_at(part, column + 1, params.columns);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * j + i] = fmaf(v[4 * j + i], weights[i / 2], add[i % 2]);
  }
}

template <class Config>
__device__ __forceinline__ void activate_columns(const ActivateColumns<Config>& columns) {
  const activation::DeviceActivation& activation = columns.params.activation;
  if constexpr (Config::kFormulas == Formulas::kAll) {
    activation::device::with_formula(activation, columns);
  } else if (activation.id == activation::ActivationId::kSwigluOai) {
    columns.template visit<activation::device::SwigluOai>();
  } else {
    columns.template visit<activation::device::Silu>();
  }
}

// 64 accumulator columns at a time.
template <class Config>
__device__ __forceinline__ void store_up(const Params& params, uint32_t staging, RowTarget target,
                                         int32_t feature_tile,
                                         float (&sums)[Config::kAccumulators]) {
  constexpr int kParts = Config::kAccumulators / 32;
  constexpr int kChunksOfPart = Config::kProduct == Product::kUpGated ? 4 : 8;
  constexpr int kPartsOfPass = Config::kPassColumns / 8 / kChunksOfPart;
  const int32_t row = static_cast<int32_t>(threadIdx.x % 32) / 4;
  float weights[2] = {1.0F, 1.0F};
  if (params.input_weights != nullptr) {
    const int32_t low = __shfl_sync(0xffffffff, target.weigh, row);
    const int32_t high = __shfl_sync(0xffffffff, target.weigh, row + 8);
    weights[0] = __ldg(params.input_weights + low);
    weights[1] = __ldg(params.input_weights + high);
  }
  const bool plain = params.bias == nullptr && params.input_weights == nullptr;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = sums[part * 32 + i];
    if (!plain) {
      const int32_t block = feature_tile * (Config::kFeatures / 8) + 8 * part;
      weigh_and_bias<Config>(params, weights, target.expert, block, v);
    }
    const int32_t in_pass = part % kPartsOfPass;
    activate_columns<Config>({params, v, staging, in_pass * kChunksOfPart});
    if (in_pass == kPartsOfPass - 1) {
      target.column = feature_tile * Config::kColumns + part / kPartsOfPass * Config::kPassColumns;
      store_rows<Config>(params, staging, target);
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_down(const Params& params, uint32_t staging, RowTarget target,
                                           int32_t feature_tile,
                                           float (&sums)[Config::kAccumulators]) {
  const int32_t pair = 2 * static_cast<int32_t>(threadIdx.x % 4);
  constexpr int kBlocksOfPass = Config::kPassColumns / 8;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    target.column = feature_tile * Config::kFeatures + pass * Config::kPassColumns;
#pragma unroll
    for (int block = 0; block < kBlocksOfPass; block += 2) {
      const int at = (pass * kBlocksOfPass + block) * 4;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = sums[at + i];
      if (params.bias != nullptr) {
        const float* bias = params.bias + static_cast<int64_t>(target.expert) * params.columns;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int32_t column = target.column + (block + i / 4) * 8 + pair + i % 2;
          v[i] += bias_at(bias, column, params.columns);
        }
      }
      stage_columns<typename Config::Element>(staging, block, v);
    }
    store_rows<Config>(params, staging, target);
  }
}

// Where a warp's 16 rows of a tile go. Asked before the product, so that its loads are hidden.
template <class Config>
__device__ __forceinline__ RowTarget find_target(const Params& params, const Work& work,
                                                 int32_t first_row) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  RowTarget target;
  target.rows = max(0, min(16, work.tile.count - first_row));
  target.expert = work.tile.expert;
  const int32_t row = first_row + lane;
  const bool exists = lane < target.rows;
  if (Config::kUpProduct) {
    target.row = work.tile.begin + row;
    if (params.input_weights != nullptr && exists) {
      target.weigh = __ldg(params.row_slot + work.tile.begin + row);
    }
  } else if (exists) {
    target.row = __ldg(params.row_slot + work.tile.begin + row);
  }
  return target;
}

template <class Config>
__device__ __forceinline__ void consume(const Params& params, SharedStorage<Config>& shared) {
  const auto consumer_warp = static_cast<int32_t>(threadIdx.x / 32) - 4;
  const int32_t warpgroup = consumer_warp / 4;
  const int32_t num_stages = (params.depth + Config::kDepth - 1) / Config::kDepth;
  const uint32_t staging = shared_address(shared.staging[consumer_warp]);
  // Named barriers of ping-pong: 1 + w opens the tensor cores to warpgroup w.
  constexpr uint32_t kTurn = 1;
  RingPosition<Config::kStages> position;
  TileWalk<Config> walk(params);
  if constexpr (Config::kPingPong) {
    if (warpgroup == 1) {
      walk.index += walk.step;
      position.advance_by(num_stages);
      named_barrier_arrive(kTurn, 256);  // warpgroup 0 begins
    }
    walk.step *= 2;
  }
  const int32_t tile_row = Config::kPingPong ? 0 : warpgroup * (Config::kTokens / 2);
  Work work = walk.next();
  while (work.valid) {
    const Work following = walk.next();
    Accumulators<Config> sums;  // of this tile only: nothing else may define wgmma's registers
    RowTarget targets[Config::kRowBlocks];
#pragma unroll
    for (int block = 0; block < Config::kRowBlocks; ++block) {
      targets[block] =
          find_target<Config>(params, work, tile_row + block * 64 + consumer_warp % 4 * 16);
    }
    if constexpr (Config::kPingPong) named_barrier_sync(kTurn + warpgroup, 256);
    const int32_t rows = work.tile.count - tile_row;
    if (rows <= 0) {
      pass_by<Config>(shared, num_stages, position);
    } else if (Config::kRowBlocks == 2 && rows <= 64) {
      multiply<Config, 1>(shared, tile_row, num_stages, position, sums);
    } else {
      multiply<Config, Config::kRowBlocks>(shared, tile_row, num_stages, position, sums);
    }
    if constexpr (Config::kPingPong) {
      named_barrier_arrive(kTurn + (warpgroup ^ 1), 256);
      position.advance_by(num_stages);
    }
#pragma unroll
    for (int block = 0; block < Config::kRowBlocks; ++block) {
      if (targets[block].rows == 0) continue;
      if constexpr (Config::kUpProduct) {
        store_up<Config>(params, staging, targets[block], work.feature_tile, sums[block]);
      } else {
        store_down<Config>(params, staging, targets[block], work.feature_tile, sums[block]);
      }
    }
    work = following;
  }
}

// ---- Kernel -----------------------------------------------------------------------------------

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tile_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw_shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.weights);
    if constexpr (!Config::kUpProduct) prefetch_tensor_map(&params.intermediate);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], Config::kFills);
      mbarrier_init(&shared.empty[stage], Config::kReleases);
    }
    fence_mbarrier_init();
  }
  if constexpr (Config::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();
  grid_launch_dependents();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if constexpr (Config::kUpProduct) {
      GatherProducer<Config>{params, shared, {}, 0, 0}.run();
    } else if (threadIdx.x == 0) {
      fence_proxy_async();  // the intermediate came by ordinary stores
      produce_down<Config>(params, shared);
    }
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(params, shared);
  }
  // The other block may still signal this one's barriers.
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace conclave::inline v0::experts::tile_sm90
