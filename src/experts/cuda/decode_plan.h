// How the decode kernel cuts a layer. Plain numbers, so that any machine can compute and test them.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// Eight warps multiply, one brings weights, one finishes tiles of the up product, one brings
// scales.
inline constexpr int32_t kDecodeWarps = 8;
inline constexpr int32_t kDecodeConsumers = kDecodeWarps * 32;
inline constexpr int32_t kDecodeThreads = kDecodeConsumers + 96;
inline constexpr int32_t kDecodeMaxTokens = 8;  // columns of a warp's product
inline constexpr int32_t kDecodeMaxPairs = 128;
inline constexpr int32_t kDecodeBarrierBytes = 256;  // at the front of the workspace
inline constexpr int32_t kDecodeBoxBytes = 128;      // of K: one swizzled line of shared memory
inline constexpr int32_t kDecodeMaxPassRows = 64;    // four products of 16 rows
inline constexpr int32_t kDecodeStageBytes = 16384;  // a box of 16 rows for each warp
inline constexpr int32_t kDecodeUpStageBoxes = kDecodeStageBytes / (16 * kDecodeBoxBytes);
inline constexpr int32_t kDecodeTileBuffers = 4;  // tiles of the up product not yet finished
// Tiles known but not finished: more than the ring and the buffers hold.
inline constexpr int32_t kDecodeTileSlots = 32;
inline constexpr int32_t kDecodeTileBytes = kDecodeConsumers * 16;

// A box is 128 bytes of K; box b of a row is warp b % 8's. A tile of the up product is 16 weight
// rows: 8 gate and 8 up rows of the same features, or 16 features where there is no gate. A block
// owns passes * pass_rows columns of the output. Rows of the intermediate come to shared memory in
// k_slices parts.
struct DecodePlan {
  int32_t blocks = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t top_k = 0;
  int32_t num_local_experts = 0;
  int32_t element_bytes = 0;
  int32_t up_boxes = 0;    // of a row of H
  int32_t down_boxes = 0;  // of a row of I
  int32_t tile_features = 0;
  int32_t feature_tiles = 0;  // of an expert
  int32_t passes = 0;
  int32_t pass_rows = 0;
  int32_t k_slices = 0;
  int32_t slice_boxes = 0;    // whole stages
  int32_t up_copy_boxes = 0;  // that one copy of TMA brings
  int32_t down_copy_boxes = 0;
  int32_t down_box_bytes = 0;      // of pass_rows rows
  int32_t down_stage_boxes = 0;    // that fit into a stage
  int32_t intermediate_bytes = 0;  // of an element: float32 where it is quantised when read
  int64_t intermediate_stride = 0;
  int32_t max_tokens = 0;
};

// Where things lie in a block's shared memory, in bytes; the ring is at 0. It depends on the number
// of tokens: few tokens leave more for weights in flight.
struct DecodeShared {
  int32_t stages = 0;
  uint32_t barriers = 0;
  uint32_t stage_scales = 0;
  uint32_t tables = 0;
  uint32_t tiles = 0;  // products of warps not yet added up
  uint32_t row_scales = 0;
  uint32_t rows = 0;
  uint32_t up_pitch = 0;    // of a row of the input
  uint32_t down_pitch = 0;  // of a slice of a row of the intermediate
  int32_t down_rows = 0;    // of those that there is room for
  uint32_t total = 0;
};

DecodePlan decode_plan(const DeviceExpertsProblem& problem);
// stages is 0 where too few fit.
DecodeShared decode_shared(const DecodePlan& plan, int64_t tokens, int64_t shared_bytes_per_block);

}  // namespace conclave::inline v0::experts
