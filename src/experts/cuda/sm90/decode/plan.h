// How the decode kernel cuts a layer. Plain numbers, so that any machine can compute and test them.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// Eight warps multiply, one loads weights, one finishes tiles of the up product, one draws them,
// one loads scales.
inline constexpr int32_t kDecodeWarps = 8;
inline constexpr int32_t kDecodeThreads = (kDecodeWarps + 4) * 32;
inline constexpr int32_t kDecodeMaxTokens = 8;  // columns per warp product
inline constexpr int32_t kDecodeMaxPairs = 128;
inline constexpr int32_t kDecodeBoxBytes = 128;      // along K: one swizzled line of shared memory
inline constexpr int32_t kDecodeMaxPassRows = 64;    // four products of 16 rows
inline constexpr int32_t kDecodeStageBytes = 16384;  // one box of 16 rows per warp
inline constexpr int32_t kDecodeUpStageBoxes = kDecodeStageBytes / (16 * kDecodeBoxBytes);
inline constexpr int32_t kDecodeTileBuffers = 4;  // for unfinished tiles of the up product
// The most that DecodePlan::tiles_ahead is.
inline constexpr int32_t kDecodeTilesAhead = 8;
// Slots for tiles that are known but not finished: more than the ring, the buffers and draws hold.
inline constexpr int32_t kDecodeTileSlots = 32;
inline constexpr int32_t kDecodeTileBytes = kDecodeWarps * 32 * 16;  // for a warp of each box

// How the columns of a box of codes share factors.
struct DecodeFactors {
  int32_t groups = 0;        // with factors of their own, in a box
  int32_t steps = 0;         // a group has, each of 16 columns, no more than a box
  int32_t columns = 0;       // a whole group has; 0: all
  int32_t stage_groups = 0;  // come with a stage
};

// A box is 128 bytes of K, whose warp is fixed by its number and its expert. A tile of the up
// product is 16 weight rows: 8 gate and 8 up rows of the same features, or 16 features without a
// gate. A block owns passes * pass_rows columns of the output. Rows of the intermediate are loaded
// to shared memory in k_slices parts.
struct DecodePlan {
  int32_t blocks = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t top_k = 0;
  int32_t num_local_experts = 0;
  int32_t weight_bits = 0;
  int32_t box_columns = 0;
  int32_t row_box_bytes = 0;  // a row in shared memory has beside a box
  bool makes_codes = false;   // rows become codes with scales
  bool has_lanes = false;     // codes lie in the order of lanes, and rows beside them
  int32_t up_boxes = 0;       // per row of H
  int32_t down_boxes = 0;     // per row of I
  int32_t tile_features = 0;
  int32_t feature_tiles = 0;  // per expert
  // A tile is drawn so many before it is begun; a block with no more than `few_tiles` draws none.
  int32_t tiles_ahead = 0;
  int32_t few_tiles = 0;
  int32_t stages_in_l2 = 0;  // the down product has, while a block waits for the others
  int32_t passes = 0;
  int32_t pass_rows = 0;
  int32_t k_slices = 0;
  int32_t slice_boxes = 0;    // per slice, a multiple of 8
  int32_t up_copy_boxes = 0;  // per TMA copy
  int32_t down_copy_boxes = 0;
  int32_t down_box_bytes = 0;      // per box of pass_rows rows
  int32_t down_stage_boxes = 0;    // per stage
  int32_t intermediate_bytes = 0;  // per element; float32 if quantised when read
  int64_t intermediate_stride = 0;
  int32_t intermediate_columns = 0;  // stored of a row, where those beyond I are 0
  int32_t max_tokens = 0;
  // Weights that are codes have these.
  DecodeFactors up_factors;
  DecodeFactors down_factors;
  int32_t down_scale_rows = 0;  // a box of scales that are bytes has; a multiple of 16
  int32_t factor_bytes = 0;     // a stage has: scales, then zero points or offsets
  int32_t second_factor = 0;    // byte at which these begin
  int32_t value_bytes = 0;      // the table of values has
};

// Layout of a block's shared memory, in bytes; the ring is at 0. Fewer tokens leave more room for
// weights in flight.
struct DecodeShared {
  int32_t stages = 0;
  uint32_t barriers = 0;
  uint32_t stage_scales = 0;
  uint32_t factors = 0;  // one part for each stage
  uint32_t values = 0;   // what codes stand for
  uint32_t tables = 0;
  uint32_t tiles = 0;  // the warps' products, not yet added up
  uint32_t row_scales = 0;
  uint32_t rows = 0;
  uint32_t up_pitch = 0;    // per input row
  uint32_t down_pitch = 0;  // per slice of an intermediate row
  int32_t down_rows = 0;    // slices that there is room for
  uint32_t total = 0;
};

// Whether codes are int8 without offsets, of which arithmetic makes bf16: they take no table.
bool takes_whole_bytes(const ExpertsProblem& problem);
// Units of steps along the columns of a box.
int32_t units_of_box(const ExpertsProblem& problem);
DecodePlan decode_plan(const ExpertsProblem& problem);
// `stages` is 0 if too few fit.
DecodeShared decode_shared(const DecodePlan& plan, int64_t tokens, int64_t shared_bytes_per_block);

}  // namespace conclave::inline v0::experts
