#include "cuda/memory_place.h"

#include "cuda/check.h"

#include "conclave/error.h"

#include <cuda_runtime_api.h>
#include <string>

namespace conclave::inline v0::cuda {
namespace {

std::string place_of(const cudaPointerAttributes& attributes) {
  if (attributes.type == cudaMemoryTypeDevice) {
    return "memory of cuda:" + std::to_string(attributes.device);
  }
  return attributes.type == cudaMemoryTypeHost ? "pinned host memory" : "host memory";
}

cudaPointerAttributes attributes_of(const void* data) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  return attributes;
}

// Managed memory belongs to every device.
bool is_here(const cudaPointerAttributes& attributes, int32_t ordinal) {
  return attributes.type == cudaMemoryTypeManaged ||
         (attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal);
}

}  // namespace

bool is_on_device(std::string_view name, const void* data, int32_t ordinal) {
  const cudaPointerAttributes attributes = attributes_of(data);
  if (attributes.type == cudaMemoryTypeDevice) check_place(name, data, ordinal);
  return is_here(attributes, ordinal);
}

void check_place(std::string_view name, const void* data, int32_t ordinal) {
  if (data == nullptr) return;
  const cudaPointerAttributes attributes = attributes_of(data);
  if (is_here(attributes, ordinal)) return;
  throw Error(ErrorCode::kDevice, {.what = "not in memory of the layer's device",
                                   .tensor = std::string(name),
                                   .expected = "memory of cuda:" + std::to_string(ordinal),
                                   .found = place_of(attributes)});
}

bool is_pinned(const void* data) { return attributes_of(data).type == cudaMemoryTypeHost; }

}  // namespace conclave::inline v0::cuda
