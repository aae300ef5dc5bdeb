// Puts codes that were copied as they are stored into the order of lanes.
#pragma once

#include "experts/cuda/lane_codes.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::experts {

// `codes` are rows in device memory, `row_bytes` each, a multiple of 32 for codes of 4 bits and of
// 16 for those of 2. Enqueues. Nothing happens to CodeOrder::kStored.
void arrange_codes(void* codes, int64_t rows, int64_t row_bytes, CodeOrder order,
                   CUstream_st* stream);

}  // namespace conclave::inline v0::experts
