// flow.h for the GPU: the structs that device stages pass to each other. All pointers are device
// pointers into the workspace, the weights or the caller's tensors; nothing here owns memory.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

// Rows of activations. 16-bit rows have no scales, unless they are values of codes with a scale for
// each row. Rows of codes have one float32 scale per row, or one per 128 columns: that of row r and
// group g is scales[r * scale_stride + g * group_stride].
struct DeviceRows {
  const void* data = nullptr;
  int64_t num_rows = 0;
  int64_t row_stride = 0;  // elements; a multiple of 16 bytes
  DType dtype = DType::kBF16;
  const float* scales = nullptr;
  int64_t scale_stride = 0;  // 1 with one scale per row
  int64_t group_stride =
      1;  // not 1 only for kernels of sorted rows: a group's scales lie side by side
};

// A tile of one expert's rows: sorted rows [begin, begin + count).
struct TokenTile {
  int32_t expert = 0;
  int32_t begin = 0;
  int32_t count = 0;  // 1 to the tile size
  // Counts the finished parts of the first product, for kernels whose second product begins on a
  // tile as soon as its first one is done. 0 after the grouping and after each call of the experts.
  uint32_t done = 0;
};

// Slots (token t, choice s; flat number t * k + s) in a stable sort by local expert, so by token
// and choice within an expert. Slots that go to no local expert are left out.
struct GroupedRows {
  const int32_t* expert_begin = nullptr;  // [E_local + 1] sorted rows
  const int32_t* row_slot = nullptr;      // [rows] flat slot of each sorted row
  const int32_t* slot_row = nullptr;      // [T * k] sorted row of each slot; -1: no local expert
  TokenTile* tiles = nullptr;             // [num_tiles], experts ascending
  const int32_t* num_tiles = nullptr;     // [1], on the device: unknown to the host
  int64_t max_rows = 0;                   // host bound: T * k; an expert chosen twice counts twice
  int64_t max_tiles = 0;                  // host bound
  int32_t tile_tokens = 0;                // rows in a full tile
  int32_t top_k = 0;
  // [1] the number of `tiles` if they were cut for another kernel because choices are skewed, with
  // num_tiles 0; otherwise 0. Null if tiles are never cut that way.
  const int32_t* num_skewed_tiles = nullptr;
  int32_t skewed_tile_tokens = 0;
};

// The same rows for the kernel that runs when choices are skewed.
constexpr GroupedRows skewed_rows(GroupedRows groups) {
  groups.num_tiles = groups.num_skewed_tiles;
  groups.tile_tokens = groups.skewed_tile_tokens;
  return groups;
}

// Shared experts that run as experts of the grouping: each token has `count` more slots after its k
// routed ones. Slot k + i has the id first_id + i and the weight factor[t * factors + i / slices],
// or `constant` if factor is null.
struct SharedSlots {
  int32_t count = 0;
  int32_t first_id = 0;
  const float* factor = nullptr;  // [T, factors], or null
  float constant = 1;
  int32_t factors = 1;
  int32_t slices = 1;     // number of slots over which an expert's columns are spread
  bool is_logit = false;  // the weight is the sigmoid of the factor
};

// The most tiles that `rows` rows over `experts` experts can form.
constexpr int64_t max_token_tiles(int64_t rows, int64_t experts, int64_t tile_tokens) {
  const int64_t full = (rows + tile_tokens - 1) / tile_tokens;
  return full + (experts < rows ? experts : rows);
}

}  // namespace conclave::inline v0
