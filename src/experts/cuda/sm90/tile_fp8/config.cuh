// Parameters, shared memory and pieces of work of tile_fp8_sm90.cuh.
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
#include "experts/cuda/common/e4m3.cuh"

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>

namespace conclave::inline v0::experts::tile_fp8 {

namespace dev = cuda::device;

enum class Product : uint8_t {
  kGated,  // weight rows in turn: 8 gate, 8 up, 8 gate...
  kPlain,  // an up product without a gate
  kDown,
  kDownSums,  // the same, weighted and added to the float32 rows of the tokens
};
enum class Scaling : uint8_t {
  kBlock,  // one scale per 128x128 weights, one per token and 128 columns
  kRow,    // one scale per weight row, one per token row
};

struct Params {
  // Sorted input rows; a tensor map describes their codes. Scales are [groups of K,
  // group_scale_stride] for kBlock, address and stride being multiples of 16 bytes, and [rows] for
  // kRow.
  const float* row_scales = nullptr;
  int64_t group_scale_stride = 0;
  const float* constant_scale = nullptr;  // kRow: [1] for all tokens, instead of row_scales
  int32_t depth = 0;                      // K
  // Weights.
  const float* weight_scales = nullptr;
  int64_t expert_scale_stride = 0;
  int64_t half_scale_stride = 0;  // from gate to up
  int32_t scale_blocks = 0;       // kBlock: along K
  const float* bias = nullptr;    // [E, 2I], [E, I] or [E, H], or null
  int32_t features = 0;           // I or H: rows of one half
  // Rows and tiles.
  const int32_t* row_slot = nullptr;
  TokenTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  void* tickets = nullptr;  // TicketCounter
  // Down begins a tile when up has stored it, which up counts in the tiles. If false, as with a
  // launch between the two, down awaits all of up.
  bool hands_over_tiles = false;
  uint32_t* ended = nullptr;     // count of down's blocks that have ended; up clears it
  int32_t up_feature_tiles = 0;  // for down: feature_tiles of up
  int32_t feature_tiles = 0;
  const float* input_weights = nullptr;  // per slot, for up products; or null
  // Results. kDown writes bf16 rows by slot; up writes codes with scales, or float32 rows, by
  // sorted row.
  void* output = nullptr;
  int64_t output_stride = 0;       // elements
  float* output_scales = nullptr;  // [groups of I, output_scale_stride]
  int64_t output_scale_stride = 0;
  const float* output_constant_scale = nullptr;  // kRow: codes with this step; null: float32 rows
  bool power_of_two = false;
  bool finishes_rows = false;             // kDown
  const float* finish_weights = nullptr;  // per slot, or null
  float finish_scale = 1;
  int32_t top_k = 1;  // kDownSums: adds to float32 row slot / top_k, times finish_weights
  activation::DeviceActivation activation;
};

template <Product kProductOf, Scaling kScalingOf, bool kWholeRoundsOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr Scaling kScaling = kScalingOf;
  static constexpr bool kAddsRows = kProduct == Product::kDownSums;
  static constexpr bool kIsDown = kProduct == Product::kDown || kAddsRows;
  // True if K takes a whole number of rounds over the ring: see multiply_tile.
  static constexpr bool kWholeRounds = kWholeRoundsOf;
  static constexpr bool kBlockScales = kScaling == Scaling::kBlock;
  static constexpr int kCluster = 2;
  static constexpr int kTokens = 128;  // per block
  static constexpr int kWeightRows = 256;
  static constexpr int kFeatures = kProduct == Product::kGated ? 128 : 256;
  static constexpr int kDepth = 128;  // bytes and elements
  static constexpr int kStages = 4;   // 4 x 48 KiB of the 227
  static constexpr int kMathThreads = 256;
  static constexpr int kLoadThreads = 128;
  static constexpr int kThreads = kMathThreads + kLoadThreads;
  // 256 x 224 + 128 x 56 = 64512 of 65536. Sums and the running chunk take 192 of the 224.
  static constexpr int kMathRegisters = 224;
  static constexpr int kLoadRegisters = 56;
  static constexpr int kBoxTokens = 64;  // per copy of token rows
  static constexpr int kStepsAhead = 8;  // weights that down prefetches to L2: 256 KiB per block
  static constexpr int kTickets = 8;     // see ClusterQueue
  static_assert(kMathThreads * kMathRegisters + kLoadThreads * kLoadRegisters <= 65536);
};

// A block's part of a piece of work.
struct TileView {
  int32_t expert = 0;  // negative: no work is left
  int32_t begin = 0;
  int32_t count = 0;  // 0: no work here, but the other block has rows
  int32_t feature_tile = 0;
  int32_t tile_index = 0;
  bool shares_weights = false;  // with the other block of the cluster
};

struct alignas(16) StageInfo {
  float token_scale[132];  // from row begin / 4 * 4 on, since copies begin at multiples of 16 bytes
  float weight_scale[2];
  TileView tile;
};

template <class C>
struct SharedStorage {
  alignas(1024) uint8_t tokens[C::kStages][C::kTokens * C::kDepth];
  alignas(1024) uint8_t weights[C::kStages][C::kWeightRows * C::kDepth];
  StageInfo info[C::kStages];
  float scratch[16][C::kMathThreads];  // for formulas that are not unrolled
  uint64_t full[C::kStages];
  uint64_t empty[C::kStages];
  uint64_t ticket_full[C::kTickets];
  uint32_t tickets[C::kTickets];
  uint64_t next_full;
  uint64_t next_empty;
  TileView next;  // from the warp that finds tiles to the warp that loads them
};

// One bit holds the phase of each stage of the ring.
struct Phases {
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t of(int32_t stage) const { return (bits >> stage) & 1; }
  __device__ __forceinline__ void flip(int32_t stage) { bits ^= 1U << stage; }
};

}  // namespace conclave::inline v0::experts::tile_fp8
