// Parameters, shared memory and items of tile_bytes.cuh.
#pragma once

#include "activation/device/formulas.cuh"
#include "core/device_flow.h"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/vocabulary.h"

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <type_traits>

namespace conclave::inline v0::experts::tile_bytes {

struct Params {
  // Sorted input rows; a tensor map describes their codes. Scales are [groups of K,
  // group_scale_stride] for kBlock, address and stride being multiples of 16 bytes, and [rows] for
  // kRow.
  const float* row_scales = nullptr;
  int64_t group_scale_stride = 0;
  const float* constant_scale = nullptr;  // kRow: [1] for all tokens, instead of row_scales
  int32_t depth = 0;                      // K
  const float* weight_scales = nullptr;
  int64_t expert_scale_stride = 0;
  int64_t half_scale_stride = 0;  // from gate to up
  int32_t scale_blocks = 0;       // kBlock: along K
  const float* bias = nullptr;    // [E, 2I], [E, I] or [E, H], or null
  int32_t features = 0;           // I or H: rows of one half
  const int32_t* row_slot = nullptr;
  TokenTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  void* tickets = nullptr;  // TicketCounter
  // If true, the down product begins an item when the up product has stored its rows, which that
  // counts in the tiles. If false, as with a launch between the two, it awaits the whole launch.
  bool hands_over_tiles = false;
  uint32_t* ended = nullptr;     // blocks of kDown that have ended; up products clear it
  int32_t up_feature_tiles = 0;  // for kDown: feature_tiles of the up product
  int32_t feature_tiles = 0;
  const float* input_weights = nullptr;  // per slot, for up products; or null
  // Results. kDown writes bf16 rows by slot; up products write codes with scales, or float32 rows,
  // by sorted row.
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

template <class Element_, Product kProductOf, Scaling kScalingOf, bool kWholeRoundsOf>
struct Config {
  using Element = Element_;
  // Sums of integers are exact: they stay in wgmma's accumulators over all of K.
  static constexpr bool kIsInteger = std::is_same_v<Element, int8_t>;
  static constexpr Product kProduct = kProductOf;
  static constexpr Scaling kScaling = kScalingOf;
  static constexpr bool kAddsRows = kProduct == Product::kDownSums;
  static constexpr bool kIsDown = !is_up(kProduct);
  // True if K takes a whole number of rounds over the ring: see multiply_item.
  static constexpr bool kWholeRounds = kWholeRoundsOf;
  static constexpr bool kBlockScales = kScaling == Scaling::kBlock;
  static constexpr int kCluster = 2;
  static constexpr int kTokens = 128;  // per block
  static constexpr int kWeightRows = 256;
  static constexpr int kFeatures = kProduct == Product::kUpGated ? 128 : 256;
  static constexpr int kDepth = 128;  // bytes and elements
  static constexpr int kStages = 4;   // 4 x 48 KiB of the 227
  static constexpr int kConsumerThreads = 256;
  static constexpr int kProducerThreads = 128;
  static constexpr int kThreads = kConsumerThreads + kProducerThreads;
  // 256 x 224 + 128 x 56 = 64512 of 65536. Sums and the running chunk take 192 of the 224.
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kBoxTokens = 64;  // per copy of token rows
  static constexpr int kStepsAhead = 8;  // weights that kDown prefetches to L2: 256 KiB per block
  static constexpr int kTickets = 8;     // see ClusterTickets
  static_assert(!kIsInteger || kScaling == Scaling::kRow);
  static_assert(kConsumerThreads * kConsumerRegisters + kProducerThreads * kProducerRegisters <=
                65536);
};

// A block's part of what its cluster does together.
struct Item {
  int32_t expert = 0;  // negative: no item is left
  int32_t begin = 0;
  int32_t count = 0;  // 0: nothing to do here, but the other block has rows
  int32_t feature_tile = 0;
  int32_t tile_index = 0;
  bool shares_weights = false;  // with the other block of the cluster
};

struct alignas(16) StageInfo {
  float token_scale[132];  // from row begin / 4 * 4 on, since copies begin at multiples of 16 bytes
  float weight_scale[2];
  Item item;
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokens * Config::kDepth];
  alignas(1024) uint8_t weights[Config::kStages][Config::kWeightRows * Config::kDepth];
  StageInfo info[Config::kStages];
  float scratch[16][Config::kConsumerThreads];  // for formulas that are not unrolled
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t ticket_full[Config::kTickets];
  uint32_t tickets[Config::kTickets];
  uint64_t item_full;
  uint64_t item_empty;
  Item item;  // from the warp that finds items to the warp that loads them
};

}  // namespace conclave::inline v0::experts::tile_bytes
