// The weights of a layer on CUDA, and what lies on its device beside them.
#pragma once

#include "cuda/check.h"
#include "cuda/stream.h"
#include "layer/cuda/cuda_refit.h"
#include "layer/cuda/expert_mover.h"
#include "layer/cuda/weight_fence.h"
#include "layer/cuda/weights.h"
#include "layer/engine.h"
#include "layer/stages/cuda/chunk.h"

#include "conclave/context.h"
#include "conclave/interop/cuda.h"

#include <cuda_runtime_api.h>
#include <memory>

namespace conclave::inline v0 {

// A layer has this on its device beside its weights; it outlives a reload.
struct DeviceSide {
  explicit DeviceSide(const Context& context)
      : stream(cuda::make_stream()),
        counters(*context.device_allocator(), sizeof(CudaCounters), to_stream(stream.get()),
                 "counters") {
    cuda::check(cudaMemsetAsync(counters.as(), 0, sizeof(CudaCounters), stream.get()),
                "cudaMemsetAsync");
  }

  // For create, reload and status, never for a forward.
  cuda::OwnedStream stream;
  DeviceMemory counters;
  WeightFence fence;
};

struct WeightsOnDevice final : LayerWeights {
  std::shared_ptr<DeviceSide> side;
  CudaWeights own;
  RefitMemory spare;  // left by a refit for the next one
  MoveMemory moves;   // likewise by experts that moved

  Stream stream() const { return to_stream(side->stream.get()); }
};

}  // namespace conclave::inline v0
