// flow.h for the GPU: what device stages hand to each other. All pointers are device pointers into
// the workspace, the weights or the caller's tensors; nothing here owns.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

// Rows of activations. 16-bit rows have no scales. e4m3 rows have a float32 scale a row, or one for
// every 128 columns: row r, group g at scales[r * scale_stride + g * group_stride].
struct DeviceRows {
  const void* data = nullptr;
  int64_t num_rows = 0;
  int64_t row_stride = 0;  // elements; a multiple of 16 bytes
  DType dtype = DType::kBF16;
  const float* scales = nullptr;
  int64_t scale_stride = 0;  // 1 for a scale a row
  int64_t group_stride =
      1;  // another only for kernels of sorted rows: rows of a group side by side
};

// A tile of rows of one expert: sorted rows [begin, begin + count).
struct TokenTile {
  int32_t expert = 0;
  int32_t begin = 0;
  int32_t count = 0;  // 1 to the tile size
  // For kernels whose second product begins where the first is done: parts of it that are done. 0
  // from the grouping on and after each call of the experts.
  uint32_t done = 0;
};

// Slots (token t, choice s; flat number t * k + s) sorted by local expert, stably: token, then
// choice. Slots that go to no local expert are not among them.
struct GroupedRows {
  const int32_t* expert_begin = nullptr;  // [E_local + 1] sorted rows
  const int32_t* row_slot = nullptr;      // [rows] flat slot of each sorted row
  const int32_t* slot_row = nullptr;      // [T * k] sorted row of each slot; -1: goes nowhere
  TokenTile* tiles = nullptr;             // [num_tiles], experts ascending
  const int32_t* num_tiles = nullptr;     // [1], on the device: the host does not know it
  int64_t max_rows = 0;                   // host bound: T * k, one expert twice is two
  int64_t max_tiles = 0;                  // host bound
  int32_t tile_tokens = 0;                // rows of a full tile
  int32_t top_k = 0;
  // Where `tiles` were cut for another kernel, because choices are skewed: [1] their number, and
  // num_tiles is 0; else 0. Null: never.
  const int32_t* num_skewed_tiles = nullptr;
  int32_t skewed_tile_tokens = 0;
};

// The same rows for the kernel that runs where choices are skewed.
constexpr GroupedRows skewed_rows(GroupedRows groups) {
  groups.num_tiles = groups.num_skewed_tiles;
  groups.tile_tokens = groups.skewed_tile_tokens;
  return groups;
}

// Shared experts that run as experts of the grouping: after its k routed slots a token has `count`
// more, slot k + i with the id first_id + i and the weight factor[t * factors + i / slices], or
// `constant`.
struct SharedSlots {
  int32_t count = 0;
  int32_t first_id = 0;
  const float* factor = nullptr;  // [T, factors], or null
  float constant = 1;
  int32_t factors = 1;
  int32_t slices = 1;     // an expert's columns lie in so many slots
  bool is_logit = false;  // the weight is the sigmoid of the factor
};

// Most tiles that `rows` rows over `experts` experts can make.
constexpr int64_t max_token_tiles(int64_t rows, int64_t experts, int64_t tile_tokens) {
  const int64_t full = (rows + tile_tokens - 1) / tile_tokens;
  return full + (experts < rows ? experts : rows);
}

}  // namespace conclave::inline v0
