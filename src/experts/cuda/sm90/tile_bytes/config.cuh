// Parameters, shared memory and items of tile_bytes.cuh.
#pragma once

#include "activation/device/formulas.cuh"
#include "core/device_flow.h"
#include "cuda/device/wgmma.cuh"
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
  // Weights of lanes: bytes of scales, [E, scale_groups, byte_stride], one for 32 columns, and [E,
  // parts] numbers that multiply sums.
  const uint8_t* scale_bytes = nullptr;
  const float* sum_factors = nullptr;
  int64_t byte_stride = 0;  // a multiple of 16
  int32_t scale_groups = 0;
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
  int32_t group_tiles = 1;               // token tiles of an expert that are walked together
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

// Says how weights lie in memory: as products read them, or as codes of 4 bits in CodeOrder::
// kLanesOfFloats.
enum class WeightForm : uint8_t { kBytes, kLanes };

template <class Element_, Product kProductOf, Scaling kScalingOf, bool kWholeRoundsOf,
          WeightForm kFormOf = WeightForm::kBytes>
struct Config {
  using Element = Element_;
  static constexpr bool kHasLanes = kFormOf == WeightForm::kLanes;
  using Products = std::conditional_t<kHasLanes, ptx::E4m3TimesE5m2, Element>;
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
  static constexpr int kDepth = 128;                 // bytes and elements
  static constexpr int kStages = kHasLanes ? 3 : 4;  // 48 KiB each, and there are 227
  static constexpr int kConsumerThreads = 256;
  static constexpr int kProducerThreads = 128;
  static constexpr int kDecoderThreads = kHasLanes ? 128 : 0;
  static constexpr int kThreads = kConsumerThreads + kProducerThreads + kDecoderThreads;
  // 256 x 224 + 128 x 56 = 64512 of 65536, or 256 x 208 + 128 x 40 + 128 x 56 = 65536. Sums and
  // the running chunk take 192 of a consumer's.
  static constexpr int kConsumerRegisters = kHasLanes ? 208 : 224;
  static constexpr int kProducerRegisters = kHasLanes ? 40 : 56;
  static constexpr int kDecoderRegisters = 56;
  // A stage is full when the producer and each decoding warp have said so.
  static constexpr int kFillers = 1 + kDecoderThreads / 32;
  static constexpr int kBoxTokens = 64;  // per copy of token rows
  static constexpr int kStepsAhead = 8;  // weights that kDown prefetches to L2: 256 KiB per block
  static constexpr int kTickets = 8;     // see ClusterTickets
  static_assert(!kIsInteger || kScaling == Scaling::kRow);
  static_assert(kConsumerThreads * kConsumerRegisters + kProducerThreads * kProducerRegisters +
                    kDecoderThreads * kDecoderRegisters <=
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

// Tells decoders what to do with a slot of codes. kHalf: the block has one half of the weight rows
// for both of the cluster; kIdle: it has no rows of the item.
enum class CodeWork : int32_t { kAll, kHalf, kIdle, kEnd };

struct alignas(16) StageInfo {
  float token_scale[132];  // from row begin / 4 * 4 on, since copies begin at multiples of 16 bytes
  float weight_scale[2];
  Item item;
};

// Holds the codes of stages that decoders have not reached: 64 bytes of a row are 128 columns,
// 64-byte swizzled, with a byte of scale for each 32.
struct CodeRing {
  static constexpr int kSlots = 3;
  static constexpr int kRowBytes = 64;
  static constexpr int kScalesOfStage = 4;
  alignas(1024) uint8_t codes[kSlots][256 * kRowBytes];
  alignas(16) uint8_t scales[kSlots][kScalesOfStage][256];
  CodeWork work[kSlots];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
};
struct NoCodeRing {};

// Factors of an item's columns and rows for one warpgroup: see factors.cuh.
struct FactorStorage {
  alignas(16) float scales[256];
  alignas(16) float biases[256];
  float rows[64];
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokens * Config::kDepth];
  alignas(1024) uint8_t weights[Config::kStages][Config::kWeightRows * Config::kDepth];
  StageInfo info[Config::kStages];
  float scratch[16][Config::kConsumerThreads];  // for formulas that are not unrolled
  FactorStorage factors[Config::kConsumerThreads / 128];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t ticket_full[Config::kTickets];
  uint32_t tickets[Config::kTickets];
  uint64_t item_full;
  uint64_t item_empty;
  Item item;  // from the warp that finds items to the warps that load them
  std::conditional_t<Config::kHasLanes, CodeRing, NoCodeRing> lanes;
};

}  // namespace conclave::inline v0::experts::tile_bytes
