#include "cuda/launch.h"

namespace conclave::inline v0::cuda {

void allow_shared_bytes(const void* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
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
  if (shape.overlap == Overlap::kWithPrevious) {
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
