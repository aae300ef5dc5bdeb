// Sums that the down product itself makes: what is before and behind it.
#pragma once

#include "dispatch/cuda/combine.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Enqueues zeros for `count` sums, a multiple of 4, at a multiple of 16 bytes.
void clear_sums(float* sums, int64_t count, CUstream_st* stream);

// Whether round_sums can stand for device_combine: rows of sums, at multiples of 16 bytes, times
// output_scale are all.
bool only_rounds(const DeviceCombineArgs& args);
// Enqueues out[t] = round(output_scale * u_t), to the bit as device_combine.
void round_sums(const DeviceCombineArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
