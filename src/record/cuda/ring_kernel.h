// The kernel that appends rows to a ring.
#pragma once

#include "conclave/dtype.h"
#include "conclave/routing_record.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::record {

// At the head of a ring's memory; 0 in every byte: empty.
struct DeviceRingState {
  uint64_t given = 0;         // tokens, those of refused calls apart
  uint64_t refused = 0;       // tokens of calls that did not fit
  uint64_t bad_ids = 0;       // that the layer has not
  uint64_t ended_blocks = 0;  // in the launch under way
  // One more than the first of them among all ids: token number times slots plus slot.
  uint64_t first_bad_id = 0;
};

struct DeviceRingRows {
  DeviceRingState* state = nullptr;
  // Token n lies in row n % capacity.
  int64_t* ring_tokens = nullptr;  // [capacity, 2]
  int32_t* ring_ids = nullptr;     // [capacity, slots]
  float* ring_weights = nullptr;   // likewise
  int64_t capacity = 0;
  int32_t slots = 0;
  int64_t num_ids = 0;
  WhenFull when_full = WhenFull::kDropOldest;

  const void* ids = nullptr;  // [T, ids_stride] kI32 or kI64
  DType ids_dtype = DType::kI32;
  int64_t ids_stride = 0;
  const float* weights = nullptr;  // [T, weights_stride]
  int64_t weights_stride = 0;
  const int64_t* tokens = nullptr;  // [T, tokens_stride], or null
  int64_t tokens_stride = 0;
  int64_t num_tokens = 0;                // T
  const int64_t* live_tokens = nullptr;  // device, or null
};

// Enqueues one launch; a call of no rows none.
void append_rows(const DeviceRingRows& rows, CUstream_st* stream);

}  // namespace conclave::inline v0::record
