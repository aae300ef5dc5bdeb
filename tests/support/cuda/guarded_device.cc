#include "support/cuda/guarded_device.h"

#include "cuda/check.h"

#include <algorithm>
#include <span>
#include <vector>

namespace conclave::testing {

GuardedDevice::GuardedDevice(size_t bytes)
    : bytes_(bytes), tail_begin_(kCanaryBytes + bytes), buffer_(bytes + 2 * kCanaryBytes) {
  poison(nullptr);
  cuda::check(cudaDeviceSynchronize(), "GuardedDevice");
}

void GuardedDevice::poison(CUstream_st* stream) {
  cuda::check(cudaMemsetAsync(buffer_.data(), 0xff, buffer_.bytes(), stream), "cudaMemsetAsync");
}

void GuardedDevice::clear(size_t bytes, CUstream_st* stream) {
  cuda::check(cudaMemsetAsync(data(), 0, bytes, stream), "cudaMemsetAsync");
}

int64_t GuardedDevice::damage() const {
  std::vector<std::byte> canary(2 * kCanaryBytes);
  cuda::check(cudaDeviceSynchronize(), "GuardedDevice");
  cuda::copy_to_host(buffer_.data(), std::span(canary).first(kCanaryBytes));
  cuda::copy_to_host(buffer_.data() + tail_begin_, std::span(canary).last(kCanaryBytes));
  return std::count_if(canary.begin(), canary.end(),
                       [](std::byte value) { return value != std::byte{0xff}; });
}

}  // namespace conclave::testing
