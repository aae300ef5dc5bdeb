// A checked kernel launch with the attributes that Hopper brought.
#pragma once

#include "cuda/check.h"

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <string_view>

namespace conclave::inline v0::cuda {

// kWithPrevious: the kernel may begin while the one before it on the stream still runs. It calls
// griddepcontrol.wait before it reads what an earlier kernel wrote. On a device whose code lacks
// that instruction it does not begin earlier.
enum class Overlap : uint8_t { kNone, kWithPrevious };
// kCooperative: all blocks are resident at once, or the launch fails. Grid-wide waits need it.
enum class Residency : uint8_t { kAny, kCooperative };

struct LaunchShape {
  int64_t blocks = 1;
  int32_t threads = 128;
  size_t shared_bytes = 0;
  int32_t cluster = 1;  // blocks per cluster, along x
  Overlap overlap = Overlap::kWithPrevious;
  Residency residency = Residency::kAny;
  cudaStream_t stream = nullptr;
};

// These ask or tell the driver about a kernel: at create, never in a forward.
// Raises a kernel's shared memory limit, as more than 48 KiB need, to `bytes` or to what the device
// has beside the kernel's own variables.
void allow_shared_bytes(const void* kernel, size_t bytes);

// Cluster size that every device with clusters supports; a kernel must ask for more.
inline constexpr int32_t kPortableCluster = 8;
void allow_large_cluster(const void* kernel);
// Returns whether the current device can hold at least one cluster of this shape. May allocate.
bool holds_cluster(const void* kernel, const LaunchShape& shape);

namespace detail {
// Fills in the attributes for `shape`; returns their number (at most 3).
unsigned fill_attributes(const LaunchShape& shape, cudaLaunchAttribute* attributes);
}  // namespace detail

// Throws Error(kDevice) naming the kernel.
template <class... Parameters, class... Arguments>
void launch(std::string_view name, void (*kernel)(Parameters...), const LaunchShape& shape,
            const Arguments&... arguments) {
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = detail::fill_attributes(shape, attributes);
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace conclave::inline v0::cuda
