// Writes zeros for tokens that no expert of this device serves.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

struct ClearRowsArgs {
  const int32_t* slot_row = nullptr;     // [T], with one slot per token; negative: no row
  int64_t num_tokens = 0;                // T
  const int64_t* live_tokens = nullptr;  // device, or null; rows from *live_tokens on stay as they
                                         // are
  int64_t row_bytes = 0;
  void* out = nullptr;           // [T, out_stride_bytes]
  int64_t out_stride_bytes = 0;  // even, as row_bytes is
};

// Enqueues one launch; enqueues nothing for no tokens. Rows of other tokens are not touched.
void clear_rows(const ClearRowsArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
