// The tables by which forwards on a device find an expert's place, and their change to those of
// another epoch: at the same addresses, so that captured graphs go on.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/cuda/weight_fence.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"
#include "conclave/interop/cuda.h"

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>

namespace conclave::inline v0 {

class PlacementSwitch {
 public:
  // Memory for the tables that are to come, unless it is there.
  void make_room(const CudaWeights& live, DeviceAllocator& allocator, cudaStream_t stream);
  // Copies the tables of `next` there. What a switch has copied from there before must have passed.
  void prepare(const CudaPlan& plan, const std::shared_ptr<const PlacementEpoch>& next,
               cudaStream_t stream);
  // Enqueues the change to the tables that are prepared: after every forward that the fence has
  // noted, before those to come. Allocates nothing and waits for nothing. No forward is between its
  // first work and its last.
  void enter(CudaWeights& live, WeightFence& fence, cudaStream_t stream) const;

 private:
  struct Table {
    DeviceMemory memory;
    size_t bytes = 0;  // replicas may be fewer than there is room for
  };

  static void stage(const std::vector<int32_t>& values, Table& table, cudaStream_t stream);

  Table local_expert_;
  Table replica_first_;
  Table replicas_;
  std::shared_ptr<const PlacementEpoch> next_;
};

}  // namespace conclave::inline v0
