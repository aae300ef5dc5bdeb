// Checks of CUDA calls: a failure becomes an Error that names the call.
#pragma once

#include <cuda_runtime_api.h>
#include <string_view>

namespace conclave::inline v0::cuda {

// Throws Error(kOutOfMemory) for a failed allocation, Error(kDevice) for every other failure.
void check(cudaError_t status, std::string_view call);

// Checks the last launch; `kernel` is its name in messages: "experts.stream_sm90.up".
void check_launch(std::string_view kernel);

}  // namespace conclave::inline v0::cuda
