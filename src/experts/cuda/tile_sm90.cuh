// Grouped products for many rows an expert: tokens are the M side of wgmma, weights the N side.
//
// A block is persistent: warpgroup 0 loads, warpgroups 1 and 2 multiply half of a tile's rows each.
// A tile is `kTokens` sorted rows of one expert times `kFeatures` weight rows. Tiles differ in
// cost (a tile of at most half its rows needs one warpgroup), so blocks draw them from a queue.
#pragma once

#include "activation/device/formulas.cuh"
#include "core/device_flow.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/silu_pair.cuh"
#include "experts/cuda/tile_sm90_params.h"

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace conclave::inline v0::experts::tile_sm90 {

using namespace cuda::device;  // NOLINT: kernels only

// 256 bytes and 16 more: rows 8 apart then begin in different banks.
inline constexpr int kStagingRowBytes = 272;

template <class ElementType, Product product, Shape shape, Formulas formulas = Formulas::kCommon>
struct Config {
  using Element = ElementType;
  static constexpr Product kProduct = product;
  static constexpr Shape kShape = shape;
  static constexpr Formulas kFormulas = formulas;
  static constexpr bool kUpProduct = product != Product::kDown;
  static constexpr int kTokens = shape.tokens;
  static constexpr int kFeatures = shape.features;
  static constexpr int kStages = shape.stages;
  static constexpr int kCluster = shape.cluster;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kAccumulators = kFeatures / 2;
  static constexpr int kDepth = 64;  // elements of K a stage: 128 bytes, the widest swizzle
  static constexpr int kRowBytes = 128;
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kFeatureBytes = kFeatures * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kFeatureBytes;
  // A warp's 16 rows of a pass, on their way from registers to global memory.
  static constexpr int kStagingBytes = 16 * kStagingRowBytes;
  // Of the 168 that each of the 384 threads begins with.
  static constexpr uint32_t kProducerRegisters = kUpProduct ? 72 : 40;
  static constexpr uint32_t kConsumerRegisters = kUpProduct ? 216 : 232;
  // Warps that release a stage, in every block of the cluster.
  static constexpr uint32_t kReleases = kConsumerWarps * kCluster;
  // Drawn tickets on their way, and who reads each: consumer warps, gathering warps or one thread.
  static constexpr int kTickets = 4;
  static constexpr uint32_t kTicketReaders = (kConsumerWarps + (kUpProduct ? 4 : 1)) * kCluster;
  // The thread that starts copies, and the 128 that gather.
  static constexpr uint32_t kFills = kUpProduct ? 129 : 1;
  // Output columns of a tile, and of one pass through the staging rows.
  static constexpr int kColumns = product == Product::kUpGated ? kFeatures / 2 : kFeatures;
  static constexpr int kPasses = kColumns > 128 ? 2 : 1;
  static constexpr int kPassColumns = kColumns / kPasses;

  static_assert(kTokens == 128, "two warpgroups of wgmma's 64 rows");
  static_assert(kFeatures % (16 * kCluster) == 0 && kPassColumns % 16 == 0);
};

template <class Config>
struct SharedStorage {
  // 1024: the period of the 128-byte swizzle.
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
  alignas(1024) uint8_t features[Config::kStages][Config::kFeatureBytes];
  alignas(16) uint8_t staging[Config::kConsumerWarps][Config::kStagingBytes];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t ticket_full[Config::kTickets];
  uint64_t ticket_empty[Config::kTickets];
  uint32_t tickets[Config::kTickets];
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
  int32_t units;  // token tiles, or pairs of them

  __device__ explicit TileWalk(const Params& p)
      : params(p),
        num_tiles(*p.num_tiles),
        units((num_tiles + Config::kCluster - 1) / Config::kCluster) {}

  __device__ __forceinline__ Work at(uint32_t ticket) const {
    Work work;
    if (ticket >= static_cast<uint32_t>(units * params.feature_tiles)) return work;
    work.valid = true;
    const auto index = static_cast<int32_t>(ticket);
    const int32_t of_group = params.group * params.feature_tiles;
    const int32_t group = index / of_group;
    const int32_t first = group * params.group;
    const int32_t width = min(params.group, units - first);
    const int32_t within = index - group * of_group;
    work.feature_tile = within / width;
    const int32_t unit = first + within - work.feature_tile * width;
    if constexpr (Config::kCluster == 1) {
      work.tile = load(unit);
    } else {
      const int32_t mine = 2 * unit + static_cast<int32_t>(cluster_rank());
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

// ---- Queue ------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_index(int cluster) {
  return blockIdx.x / static_cast<uint32_t>(cluster);
}
__device__ __forceinline__ uint32_t num_clusters(int cluster) {
  return gridDim.x / static_cast<uint32_t>(cluster);
}

// The counter of a launch, in 16 bytes of the workspace: a mark of 96 bits, then the number of
// tickets drawn. Whoever finds no mark writes it with a count of 0, and who draws the last ticket
// of a launch sets the count back: nothing need be cleared beforehand. Of one thread a cluster.
struct TicketCounter {
  static constexpr uint64_t kMarkHigh = 0x9D39C8B2E5A1F764;
  static constexpr uint64_t kMarkLow = 0x5BD1E995;  // above the count

  void* memory;
  uint32_t clusters;
  uint32_t tickets;  // of the launch
  uint32_t drawn = 0;

  __device__ __forceinline__ void mark() const {
    const Word128 found = compare_and_swap_128(memory, {}, {});
    if (found.high == kMarkHigh && found.low >> 32 == kMarkLow) return;
    compare_and_swap_128(memory, found, {kMarkLow << 32, kMarkHigh});
  }

  // The first two tickets of a cluster are its own by position; the counter gives those beyond.
  __device__ __forceinline__ void draw() {
    drawn = 2 * clusters + add_relaxed(static_cast<uint32_t*>(memory), 1);
  }

  // Every cluster draws until it has one past the end.
  __device__ __forceinline__ bool past_end() const { return drawn >= tickets; }
  __device__ __forceinline__ void reset_if_last() const {
    const uint32_t first_past_end = max(tickets, 2 * clusters);
    if (drawn == first_past_end + clusters - 1) {
      *static_cast<volatile uint32_t*>(memory) = 0;
    }
  }
};

// The thread that draws for a cluster and hands each ticket to both blocks.
template <class Config>
struct TicketGiver {
  SharedStorage<Config>& shared;
  TicketCounter counter;
  RingPosition<Config::kTickets> position;

  __device__ __forceinline__ void draw() {
    counter.draw();
    if (counter.past_end()) counter.reset_if_last();
  }
  // Gives the ticket drawn before and asks for the next one, which comes while a tile is computed.
  __device__ __forceinline__ void give() {
    mbarrier_wait(&shared.ticket_empty[position.stage], position.phase ^ 1);
    uint32_t* slot = &shared.tickets[position.stage];
    uint64_t* full = &shared.ticket_full[position.stage];
    if constexpr (Config::kCluster == 1) {
      *static_cast<volatile uint32_t*>(slot) = counter.drawn;
      mbarrier_arrive(full);
    } else {
      for (uint32_t rank = 0; rank < Config::kCluster; ++rank) {
        publish_to_cluster(slot, counter.drawn, full, rank);
      }
    }
    position.advance();
    if (!counter.past_end()) draw();
  }
};

// A role's sequence of tickets; `single` where a lone thread reads and not a warp.
template <class Config>
struct TicketReader {
  SharedStorage<Config>& shared;
  bool single;
  uint32_t order = 0;
  RingPosition<Config::kTickets> position;

  __device__ __forceinline__ uint32_t next() {
    if (order < 2) {
      return cluster_index(Config::kCluster) + order++ * num_clusters(Config::kCluster);
    }
    uint64_t* full = &shared.ticket_full[position.stage];
    if constexpr (Config::kCluster == 1) {
      mbarrier_wait(full, position.phase);
    } else {
      mbarrier_wait_cluster(full, position.phase);
    }
    const uint32_t ticket = *static_cast<volatile uint32_t*>(&shared.tickets[position.stage]);
    if (!single) __syncwarp();
    if (single || threadIdx.x % 32 == 0) {
      uint64_t* empty = &shared.ticket_empty[position.stage];
      if constexpr (Config::kCluster == 1) {
        mbarrier_arrive(empty);
      } else {
        mbarrier_arrive_cluster(empty, 0);
      }
    }
    position.advance();
    return ticket;
  }
};

// The producer's view: thread 0 of the cluster's first block also draws. It begins when the first
// tile's loads are under way, so that nothing waits for the counter.
template <class Config>
struct TicketProducer {
  TicketReader<Config> reader;
  TicketGiver<Config> giver;
  bool gives;
  bool begun = false;

  __device__ TicketProducer(const Params& params, SharedStorage<Config>& shared, int32_t units,
                            bool single)
      : reader{shared, single},
        giver{shared,
              {params.queue, num_clusters(Config::kCluster),
               static_cast<uint32_t>(units * params.feature_tiles)}},
        gives(threadIdx.x == 0 && (Config::kCluster == 1 || cluster_rank() == 0)) {}

  __device__ __forceinline__ void begin() {
    begun = true;
    giver.counter.mark();
    giver.draw();
  }
  __device__ __forceinline__ uint32_t next() {
    if (gives && reader.order == 2) {
      if (!begun) begin();
      giver.give();
    }
    return reader.next();
  }
  // Every cluster draws, also one without tiles: the counter knows its last ticket by that.
  __device__ __forceinline__ void finish() {
    if (gives && !begun) begin();
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
// weights copied. Rows count on the stage's barrier when they have landed.
template <class Config>
struct GatherProducer {
  static constexpr int kRowsEach = Config::kTokens / 16;

  const Params& params;
  SharedStorage<Config>& shared;
  int32_t first_row;  // of this thread; the others are 16 apart
  int32_t chunk;      // of 16 bytes in a row's 128

  // Slots of the rows, asked a tile ahead: loads that wait for one another would empty the ring.
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
    // The swizzle: chunk c of row r lies at c ^ (r % 8); rows 16 apart have the same one.
    const auto offset =
        static_cast<uint32_t>(first_row * Config::kRowBytes + ((chunk ^ (first_row % 8)) * 16));
    const uint32_t base = shared_address(shared.tokens[0]) + offset;
    RingPosition<Config::kStages> position;
    const TileWalk<Config> walk(params);
    TicketProducer<Config> tickets(params, shared, walk.units, false);
    Work work = walk.at(tickets.next());
    uint32_t slots[kRowsEach];
    read_slots(work, slots);
    while (work.valid) {
      uint32_t tokens[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        tokens[i] = slots[i] / static_cast<uint32_t>(params.top_k);
      }
      const Work following = walk.at(tickets.next());
      read_slots(following, slots);
      for (int32_t k = 0; k < params.depth; k += Config::kDepth) {
        mbarrier_wait(&shared.empty[position.stage], position.phase ^ 1);
        if (threadIdx.x == 0) {
          load_features<Config>(params, shared, position.stage, work, k, Config::kFeatureBytes);
        }
        __syncwarp();
        gather(tokens, work.tile.count, k,
               base + static_cast<uint32_t>(position.stage * Config::kTokenBytes));
        cp_async_mbarrier_arrive_noinc(&shared.full[position.stage]);
        position.advance();
      }
      work = following;
    }
    tickets.finish();
  }
};

// The down product: one thread has both operands copied.
template <class Config>
__device__ __forceinline__ void produce_down(const Params& params, SharedStorage<Config>& shared) {
  RingPosition<Config::kStages> position;
  const TileWalk<Config> walk(params);
  TicketProducer<Config> tickets(params, shared, walk.units, true);
  Work work = walk.at(tickets.next());
  while (work.valid) {
    const Work following = walk.at(tickets.next());
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
    work = following;
  }
  tickets.finish();
}

// ---- Consumer ---------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void release(SharedStorage<Config>& shared, int32_t stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < Config::kCluster) mbarrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

// The product of 64 rows. One group of wgmma stays in flight; the stage before it
// goes back to the producer.
template <class Config>
__device__ __forceinline__ void multiply(SharedStorage<Config>& shared, int32_t first_row,
                                         int32_t num_stages,
                                         RingPosition<Config::kStages>& position,
                                         float (&sums)[Config::kAccumulators]) {
  const uint64_t tokens =
      wgmma_descriptor_128b(shared_address(shared.tokens[0]) + first_row * Config::kRowBytes);
  const uint64_t features = wgmma_descriptor_128b(shared_address(shared.features[0]));
  int32_t previous = 0;
  for (int32_t i = 0; i < num_stages; ++i) {
    mbarrier_wait(&shared.full[position.stage], position.phase);
    // cp.async writes as ordinary stores do; wgmma reads as the copy engine does.
    if constexpr (Config::kUpProduct) fence_proxy_async_shared();
    const uint64_t a = tokens + static_cast<uint32_t>(position.stage * (Config::kTokenBytes / 16));
    const uint64_t b =
        features + static_cast<uint32_t>(position.stage * (Config::kFeatureBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<typename Config::Element, Config::kFeatures>::mma(sums, a + step * 2, b + step * 2,
                                                              step > 0 || i > 0);
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

__device__ __forceinline__ uint32_t staging_offset(int32_t row, int32_t chunk) {
  return static_cast<uint32_t>(row * kStagingRowBytes + chunk * 16);
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

// Until the staging rows of this warp may be written again.
__device__ __forceinline__ void await_staging() {
  bulk_wait_group_read<0>();
  __syncwarp();
}

// A pass of staged rows by ordinary stores: the last columns of a width that is not a multiple of
// 16 bytes.
template <class Config>
__device__ __noinline__ void store_ragged_rows(const Params& params, const uint8_t* staging,
                                               RowTarget target) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* output = static_cast<uint16_t*>(params.output);
  const int32_t columns = min(Config::kPassColumns, params.columns - target.column);
  for (int32_t row = 0; row < target.rows; ++row) {
    const int32_t to = __shfl_sync(0xffffffff, target.row, row);
    const auto* from = reinterpret_cast<const uint16_t*>(staging + staging_offset(row, 0));
    uint16_t* destination =
        output + static_cast<int64_t>(to) * params.output_stride + target.column;
    for (int32_t column = lane; column < columns; column += 32) destination[column] = from[column];
  }
  __syncwarp();
}

// kPassColumns columns of staged rows to global memory: a copy a row, which goes on while the warp
// computes.
template <class Config>
__device__ __forceinline__ void store_rows(const Params& params, const uint8_t* staging,
                                           const RowTarget& target) {
  const int32_t left = params.columns - target.column;
  if (left <= 0) return;
  // The intermediate's rows have room for whole chunks.
  const int32_t columns = min(Config::kPassColumns, Config::kUpProduct ? (left + 7) / 8 * 8 : left);
  if (!params.whole_chunks || columns % 8 != 0) {
    __syncwarp();
    store_ragged_rows<Config>(params, staging, target);
    return;
  }
  fence_proxy_async_shared();
  __syncwarp();
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (lane < target.rows) {
    auto* output = static_cast<typename Config::Element*>(params.output);
    bulk_store(output + static_cast<int64_t>(target.row) * params.output_stride + target.column,
               staging + staging_offset(lane, 0), static_cast<uint32_t>(columns * 2));
    bulk_commit_group();
  }
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
        if constexpr (kGated && std::is_same_v<Formula, activation::device::Silu>) {
          if (i % 2 == 1) continue;
          const int at = first + (i / 4) * 8 + i % 4;
          result[i] = v[at];
          result[i + 1] = v[at + 1];
          silu_pair(result[i], result[i + 1], v[at + 4], v[at + 5]);
        } else if constexpr (kGated) {
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
__device__ __forceinline__ void store_up(const Params& params, const uint8_t* staging,
                                         RowTarget target, int32_t feature_tile,
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
    if (in_pass == 0) await_staging();
    activate_columns<Config>({params, v, shared_address(staging), in_pass * kChunksOfPart});
    if (in_pass == kPartsOfPass - 1) {
      target.column = feature_tile * Config::kColumns + part / kPartsOfPass * Config::kPassColumns;
      store_rows<Config>(params, staging, target);
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_down(const Params& params, const uint8_t* staging,
                                           RowTarget target, int32_t feature_tile,
                                           float (&sums)[Config::kAccumulators]) {
  const int32_t pair = 2 * static_cast<int32_t>(threadIdx.x % 4);
  constexpr int kBlocksOfPass = Config::kPassColumns / 8;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    target.column = feature_tile * Config::kFeatures + pass * Config::kPassColumns;
    await_staging();
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
      stage_columns<typename Config::Element>(shared_address(staging), block, v);
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
  const uint8_t* staging = shared.staging[consumer_warp];
  const int32_t first_row = warpgroup * 64;
  const int32_t warp_row = first_row + consumer_warp % 4 * 16;
  RingPosition<Config::kStages> position;
  const TileWalk<Config> walk(params);
  TicketReader<Config> tickets{shared, false};
  Work work = walk.at(tickets.next());
  while (work.valid) {
    const Work following = walk.at(tickets.next());
    const RowTarget target = find_target<Config>(params, work, warp_row);
    float sums[Config::kAccumulators];  // of this tile only: nothing else may define wgmma's
                                        // registers
    if (work.tile.count > first_row) {
      multiply<Config>(shared, first_row, num_stages, position, sums);
    } else {
      pass_by<Config>(shared, num_stages, position);
    }
    if (target.rows > 0) {
      if constexpr (Config::kUpProduct) {
        store_up<Config>(params, staging, target, work.feature_tile, sums);
      } else {
        store_down<Config>(params, staging, target, work.feature_tile, sums);
      }
    }
    work = following;
  }
  bulk_wait_group<0>();
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
    for (int ticket = 0; ticket < Config::kTickets; ++ticket) {
      mbarrier_init(&shared.ticket_full[ticket], 1);
      mbarrier_init(&shared.ticket_empty[ticket], Config::kTicketReaders);
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
      const auto thread = static_cast<int32_t>(threadIdx.x);
      GatherProducer<Config>{params, shared, thread / 8, thread % 8}.run();
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
