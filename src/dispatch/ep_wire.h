// The header that each rank sends each peer before its rows: its plan and the number of rows.
#pragma once

#include "dispatch/ep_plan.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::dispatch {

// All fields have 64 bits, so that there is no padding and every byte is written.
struct WireHeader {
  int64_t version = 0;
  int64_t max_tokens = 0;
  int64_t top_k = 0;
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  int64_t row_bytes = 0;
  int64_t row_dtype = 0;
  int64_t ep_size = 0;
  int64_t placement = 0;
  int64_t transport = 0;
  int64_t combine = 0;
  int64_t epoch = 0;
  int64_t num_rows = 0;
};

WireHeader make_header(const EpPlan& plan, uint64_t epoch, int64_t num_rows);

// The number of rows that `rank` announces. Throws CommError(kCommMismatch) naming the first field
// in which its plan or its epoch differs from ours, or a number of rows that the plan rules out.
int64_t checked_rows(const EpPlan& plan, uint64_t epoch, const WireHeader& theirs, int32_t rank);

}  // namespace conclave::inline v0::dispatch
