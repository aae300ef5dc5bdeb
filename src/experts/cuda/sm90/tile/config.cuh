// The shape and the shared memory of a kernel of tile.cuh.
#pragma once

#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/tile/params.h"

#include <cstdint>

namespace conclave::inline v0::experts::tile {

template <class ElementType, Product product, Shape shape, Formulas formulas = Formulas::kCommon>
struct Config {
  using Element = ElementType;
  static constexpr Product kProduct = product;
  static constexpr Shape kShape = shape;
  static constexpr Formulas kFormulas = formulas;
  static constexpr bool kAddsRows = product == Product::kDownSums;
  static constexpr bool kUpProduct = is_up(product);
  static constexpr bool kGathers = shape.gathers;
  static constexpr int kTokens = shape.tokens;
  static constexpr int kFeatures = shape.features;
  static constexpr int kStages = shape.stages;
  static constexpr int kCluster = shape.cluster;
  static constexpr int kWarpgroups = kTokens / 64;  // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kAccumulators = kFeatures / 2;
  static constexpr int kDepth = 64;  // elements of K per stage: 128 bytes, the widest swizzle
  static constexpr int kRowBytes = 128;
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kFeatureBytes = kFeatures * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kFeatureBytes;
  // Each of 384 threads begins with 168 registers. The down product keeps twice as many results.
  static constexpr uint32_t kProducerRegisters = kGathers ? 72 : kUpProduct ? 56 : 40;
  static constexpr uint32_t kConsumerRegisters = kGathers ? 216 : kUpProduct ? 224 : 232;
  // kHalves: items of the last round may be cut into halves of their features. kBoxFeatures: weight
  // rows per copy. Single blocks would lose more by smaller copies (1 to 2 %) than they gain.
  static constexpr bool kHalves = kFeatures == 256 && kCluster == 2;
  static constexpr int kBoxFeatures = kFeatures / kCluster;
  // Warps that release a stage, in every block of the cluster.
  static constexpr uint32_t kReleases = kConsumerWarps * kCluster;
  // Items that are told ahead, and readers of each: consumer warps, and four gathering warps or one
  // thread.
  static constexpr int kItems = 2;
  static constexpr uint32_t kItemReaders = (kConsumerWarps + (kGathers ? 4 : 1)) * kCluster;
  // Arrivals that fill a stage: the thread that starts copies, and the 128 that gather.
  static constexpr uint32_t kFills = kGathers ? 129 : 1;
  // Output columns of an item, and of one pass through the staging rows.
  static constexpr int kColumns = product == Product::kUpGated ? kFeatures / 2 : kFeatures;
  static constexpr int kPassColumns = kColumns > 128 ? kColumns / 2 : kColumns;
  static constexpr int kPasses = kColumns / kPassColumns;
  // Staging for a warp's 16 rows of a pass, between registers and global memory. The extra 16 bytes
  // let neighbouring rows begin in different banks.
  static constexpr int kStagingRowBytes = 2 * kPassColumns + 16;
  static constexpr int kStagingBytes = 16 * kStagingRowBytes;
  // An item's results wait in registers and are stored during the next item's products: this many
  // passes during its first stage, the others during the second.
  static constexpr int kFirstPasses = (kPasses + 1) / 2;
  // Registers for a thread's rounded results, two results in each.
  static constexpr int kResults = kColumns / 4;

  static_assert(kTokens % 64 == 0, "a warpgroup for each of wgmma's 64 rows");
  static_assert(kFeatures % (16 * kCluster) == 0 && kPassColumns % 16 == 0);
};

template <class Config>
struct SharedStorage {
  // The period of the 128-byte swizzle is 1024 bytes.
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
  alignas(1024) uint8_t features[Config::kStages][Config::kFeatureBytes];
  alignas(16) uint8_t staging[Config::kConsumerWarps][Config::kStagingBytes];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  alignas(16) int4 items[Config::kItems];
  uint64_t item_full[Config::kItems];
  uint64_t item_empty[Config::kItems];
};

// The stages of an item are at least two, of which the second may be zeros: the previous item's
// results are stored in between.
template <class Config>
__device__ __forceinline__ int32_t stages_of_item(const Params& params) {
  return max(2, (params.depth + Config::kDepth - 1) / Config::kDepth);
}

}  // namespace conclave::inline v0::experts::tile
