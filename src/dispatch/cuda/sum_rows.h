// The steps before and after the sums that the down product itself makes.
#pragma once

#include "dispatch/cuda/combine.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// Enqueues the clearing of `count` sums, a multiple of 4, at a multiple of 16 bytes.
void clear_sums(float* sums, int64_t count, CUstream_st* stream);

// Enqueues out[t] = round(output_scale * u_t), with the bits of device_combine, where nothing but
// such rows of sums, at multiples of 16 bytes, makes the output.
void round_sums(const DeviceCombineArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
