// Every CUDA call goes through here: a failure is an Error that names the call.
#pragma once

#include <cuda_runtime_api.h>
#include <string_view>

namespace conclave::inline v0::cuda {

// Throws Error(kOutOfMemory) for a failed allocation, Error(kDevice) for all else.
void check(cudaError_t status, std::string_view call);

// After a launch; `kernel` is its name in messages: "experts.stream_sm90.up".
void check_launch(std::string_view kernel);

}  // namespace conclave::inline v0::cuda
