// Makes plans of layers on an H200 without having one.
#pragma once

#include "layer/cuda/plan.h"

namespace conclave::testing {

inline cuda::DeviceInfo h200() {
  return {.name = "NVIDIA H200",
          .capability = {9, 0},
          .multiprocessors = 132,
          .l2_bytes = int64_t{60} << 20,
          .memory_bytes = int64_t{141} << 30,
          .shared_bytes_per_block = int64_t{227} << 10,
          .cluster_blocks = 16};
}

inline CudaPlan plan(const MoeSpec& spec, const LayerOptions& options = {},
                     const ParallelSpec& parallel = {}) {
  const cuda::DeviceInfo device = h200();
  return plan_cuda_layer(
      {.spec = spec, .options = options, .parallel = parallel, .device = device});
}

}  // namespace conclave::testing
