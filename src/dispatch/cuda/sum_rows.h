// The steps before and after the sums that the down product itself makes.
#pragma once

#include "dispatch/cuda/combine.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Enqueues the clearing of `count` sums, a multiple of 4, at a multiple of 16 bytes.
void clear_sums(float* sums, int64_t count, CUstream_st* stream);

// True if round_sums can replace device_combine: the output is just rows of sums, at multiples of
// 16 bytes, times output_scale.
bool only_rounds(const DeviceCombineArgs& args);
// Enqueues out[t] = round(output_scale * u_t), with the bits of device_combine.
void round_sums(const DeviceCombineArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
