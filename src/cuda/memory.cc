#include "cuda/memory.h"

#include "cuda/check.h"

#include <cuda_runtime_api.h>

namespace conclave::inline v0::cuda {

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

void copy_to_device(std::span<const std::byte> source, void* destination) {
  if (source.empty()) return;
  check(cudaMemcpy(destination, source.data(), source.size(), cudaMemcpyHostToDevice),
        "cudaMemcpy to the device");
  // cudaMemcpy may return while small copies are still in flight, and streams that do not wait for
  // the legacy one would overtake them.
  check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
}

void copy_to_host(const void* source, std::span<std::byte> destination) {
  if (destination.empty()) return;
  check(cudaMemcpy(destination.data(), source, destination.size(), cudaMemcpyDeviceToHost),
        "cudaMemcpy to the host");
}

}  // namespace conclave::inline v0::cuda
