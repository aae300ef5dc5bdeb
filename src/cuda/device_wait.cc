#include "cuda/device_wait.h"

#include "cuda/check.h"
#include "cuda/device_info.h"

#include "conclave/error.h"

#include <cuda_runtime_api.h>

namespace conclave::inline v0::cuda {

bool wait_for_device() {
  const cudaError_t status = cudaDeviceSynchronize();
  switch (status) {
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      static_cast<void>(cudaGetLastError());
      return false;
    default:
      check(status, "cudaDeviceSynchronize");
      return true;
  }
}

bool has_ended(int ordinal) noexcept {
  try {
    const DeviceGuard guard(ordinal);
    return wait_for_device();
  } catch (const Error&) {
    return true;
  }
}

}  // namespace conclave::inline v0::cuda
