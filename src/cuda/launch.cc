#include "cuda/launch.h"

#include "cuda/architecture.h"
#include "cuda/device_info.h"

#include <algorithm>
#include <vector>

namespace conclave::inline v0::cuda {
namespace {

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "cudaDeviceGetAttribute");
  return value;
}

int current_device() {
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "cudaGetDevice");
  return ordinal;
}

bool knows_overlap(const Architecture& code) { return code.capability >= kFirstWithOverlap; }

// Whether the plain code that each device of this process takes can wait for the launch before it.
std::vector<bool> overlap_by_device() {
  std::vector<bool> overlaps;
  for (int ordinal = 0; ordinal < count_devices().count; ++ordinal) {
    const Capability device{attribute(cudaDevAttrComputeCapabilityMajor, ordinal),
                            attribute(cudaDevAttrComputeCapabilityMinor, ordinal)};
    const Architecture* const code = code_for(device, plain_architectures());
    overlaps.push_back(code != nullptr && knows_overlap(*code));
  }
  return overlaps;
}

// Asks the driver for the current device only in a build that has older code as well.
bool launches_may_overlap() {
  static const bool all_know = std::ranges::all_of(plain_architectures(), knows_overlap);
  if (all_know) return true;
  static const std::vector<bool> overlaps = overlap_by_device();
  return overlaps[static_cast<size_t>(current_device())];
}

}  // namespace

void allow_shared_bytes(const void* kernel, size_t bytes) {
  cudaFuncAttributes own{};
  check(cudaFuncGetAttributes(&own, kernel), "cudaFuncGetAttributes");
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device()) -
                   static_cast<int>(own.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             std::min(static_cast<int>(bytes), most)),
        "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
}

void allow_large_cluster(const void* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
}

bool holds_cluster(const void* kernel, const LaunchShape& shape) {
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = attributes;
  config.numAttrs = detail::fill_attributes(shape, attributes);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
        "cudaOccupancyMaxActiveClusters");
  return clusters > 0;
}

namespace detail {

unsigned fill_attributes(const LaunchShape& shape, cudaLaunchAttribute* attributes) {
  unsigned count = 0;
  if (shape.overlap == Overlap::kWithPrevious && launches_may_overlap()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (shape.residency == Residency::kCooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  return count;
}

}  // namespace detail

}  // namespace conclave::inline v0::cuda
