// Memory for the experts of one kernel on the device, and what fills it.
#pragma once

#include "cuda/check.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"
#include "conclave/interop/cuda.h"

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace conclave::inline v0 {

class DeviceArrays {
 public:
  DeviceArrays(DeviceAllocator& allocator, Stream stream)
      : allocator_(allocator), stream_(stream) {}

  // Memory is cleared, so that reads beyond a matrix yield numbers.
  DeviceMemory make(int64_t bytes, const char* what) const {
    DeviceMemory memory(allocator_, static_cast<size_t>(bytes), stream_, what);
    if (!memory.empty()) {
      cuda::check(cudaMemsetAsync(memory.as(), 0, memory.bytes(), to_cuda(stream_)),
                  "cudaMemsetAsync");
    }
    return memory;
  }
  DeviceMemory floats(int64_t count, const char* what) const {
    return make(count * int64_t{sizeof(float)}, what);
  }

 private:
  DeviceAllocator& allocator_;
  Stream stream_;
};

// No memory for matrices that `lender`, if given, has where kernels can read them.
CudaMlpWeights allocate_mlp(const DeviceArrays& arrays, const MlpSource& mlp,
                            const WeightSource* lender);
// Throws Error(kState) if matrices that are used in place are not those of `source`.
void check_lent(const MlpSource& mlp, const WeightSource& source, const CudaMlpWeights& weights);
// Fills the places of the experts. Throws as check_lent.
void fill_mlp(const MlpSource& mlp, const WeightSource& source, UploadLanes& lanes,
              CudaMlpWeights& weights, const Context& context);

}  // namespace conclave::inline v0
