// Parameters of kernels that combine rows, made of a combine's arguments.
#pragma once

#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/combine_rows.cuh"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::dispatch {

device::DeviceTensor device_tensor(const void* data, int64_t stride, DType dtype);
// For units of so many parts of kPartColumns columns.
device::CombineParams combine_params(const DeviceCombineArgs& args, int parts);

}  // namespace conclave::inline v0::dispatch
