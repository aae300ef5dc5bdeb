#include "cuda/device_info.h"

#include "cuda/check.h"

#include "conclave/error.h"

#include <cuda_runtime_api.h>
#include <string>

namespace conclave::inline v0::cuda {
namespace {

// "CUDA 13.0", the version that this library was built with.
std::string runtime_text() {
  return "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
         std::to_string(CUDART_VERSION % 1000 / 10);
}

int32_t attribute(cudaDeviceAttr which, int32_t ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "cudaDeviceGetAttribute");
  return value;
}

DeviceClocks clocks_of(int32_t ordinal, int32_t multiprocessors) {
  return {.multiprocessors = multiprocessors,
          .core_khz = attribute(cudaDevAttrClockRate, ordinal),
          .memory_khz = attribute(cudaDevAttrMemoryClockRate, ordinal),
          .memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal)};
}

}  // namespace

DeviceInfo device_info(int32_t ordinal) {
  const DeviceCount devices = count_devices();
  if (ordinal < 0 || ordinal >= devices.count) {
    throw Error(
        ErrorCode::kDevice,
        {.what = "no such CUDA device",
         .found = "cuda:" + std::to_string(ordinal),
         .limit = devices.count > 0 ? std::to_string(devices.count) + " devices" : devices.reason});
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  return {.name = properties.name,
          .ordinal = ordinal,
          .capability = {properties.major, properties.minor},
          .multiprocessors = properties.multiProcessorCount,
          .l2_bytes = properties.l2CacheSize,
          .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
          .shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin),
          .rates = device_rates(properties.name, {properties.major, properties.minor},
                                clocks_of(ordinal, properties.multiProcessorCount))};
}

DeviceCount count_devices() noexcept {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {.count = count, .reason = {}};
  static_cast<void>(cudaGetLastError());
  if (status == cudaSuccess) return {.count = 0, .reason = "the driver sees no device"};
  // The runtime also reports this if there is no driver at all.
  if (status == cudaErrorInsufficientDriver) {
    return {.count = 0, .reason = "no NVIDIA driver, or one older than " + runtime_text()};
  }
  return {.count = 0, .reason = cudaGetErrorString(status)};
}

DeviceGuard::DeviceGuard(int32_t ordinal) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ != ordinal) check(cudaSetDevice(ordinal), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() { static_cast<void>(cudaSetDevice(previous_)); }

}  // namespace conclave::inline v0::cuda
