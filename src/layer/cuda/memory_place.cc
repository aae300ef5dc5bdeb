#include "layer/cuda/memory_place.h"

#include "cuda/check.h"

#include "conclave/error.h"

#include <cuda_runtime_api.h>
#include <string>

namespace conclave::inline v0 {
namespace {

std::string place_of(const cudaPointerAttributes& attributes) {
  if (attributes.type == cudaMemoryTypeDevice) {
    return "memory of cuda:" + std::to_string(attributes.device);
  }
  return attributes.type == cudaMemoryTypeHost ? "pinned host memory" : "host memory";
}

}  // namespace

// Managed memory belongs to every device.
void check_place(std::string_view name, const void* data, int32_t ordinal) {
  if (data == nullptr) return;
  cudaPointerAttributes attributes{};
  cuda::check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  const bool is_here = attributes.type == cudaMemoryTypeManaged ||
                       (attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal);
  if (is_here) return;
  throw Error(ErrorCode::kDevice, {.what = "not in memory of the layer's device",
                                   .tensor = std::string(name),
                                   .expected = "memory of cuda:" + std::to_string(ordinal),
                                   .found = place_of(attributes)});
}

}  // namespace conclave::inline v0
