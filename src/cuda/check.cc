#include "cuda/check.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0::cuda {

void check(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  // Clears an error that is not sticky, so that it does not show up in the next call.
  static_cast<void>(cudaGetLastError());
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error(memory ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
              {.what = std::string(call) + " failed",
               .found = std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status)});
}

void check_launch(std::string_view kernel) {
  check(cudaGetLastError(), std::string("launch of ").append(kernel));
}

}  // namespace conclave::inline v0::cuda
