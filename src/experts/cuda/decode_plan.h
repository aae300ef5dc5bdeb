// How the decode kernel cuts a layer. Plain numbers, so that any machine can compute and test them.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>

namespace conclave::inline v0::experts {

inline constexpr int32_t kDecodeWarps = 8;
inline constexpr int32_t kDecodeThreads = kDecodeWarps * 32;
inline constexpr int32_t kDecodeMaxTokens = 8;  // columns of a warp's product
inline constexpr int32_t kDecodeMaxPairs = kDecodeThreads;
inline constexpr int32_t kDecodeBoxBytes = 128;     // of K: one swizzled line of shared memory
inline constexpr int32_t kDecodeMaxPassRows = 32;   // two products of 16 rows
inline constexpr int32_t kDecodeStageBytes = 4096;  // 32 rows of one box, 16 rows of two

// A box is 128 bytes of K. A tile of the up product is 16 weight rows: 8 gate and 8 up rows of the
// same features, or 16 features where there is no gate. A block owns passes * pass_rows columns of
// the output, and k_slices warps share the columns' sum over I.
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
  int32_t down_box_bytes = 0;      // of pass_rows rows, padded to whole products
  int32_t down_stage_boxes = 0;    // that fit into a stage
  int32_t intermediate_bytes = 0;  // of an element: float32 where it is quantised when read
  int64_t intermediate_stride = 0;
  int32_t max_tokens = 0;

  constexpr int32_t block_rows() const { return passes * pass_rows; }
};

// Where things lie in a block's shared memory, in bytes; the ring is at 0. It depends on the number
// of tokens: few tokens leave more for weights in flight.
struct DecodeShared {
  int32_t stages = 0;  // of each warp's ring
  uint32_t barriers = 0;
  uint32_t stage_scales = 0;
  uint32_t tables = 0;
  uint32_t row_scales = 0;
  uint32_t rows = 0;
  uint32_t row_pitch = 0;
  uint32_t total = 0;
};

DecodePlan decode_plan(const DeviceExpertsProblem& problem);
// stages is 0 where not even two fit.
DecodeShared decode_shared(const DecodePlan& plan, int64_t tokens, int64_t shared_bytes_per_block);

}  // namespace conclave::inline v0::experts
