#include "layer/cuda/placement_switch.h"

#include "cuda/check.h"

#include <vector>

namespace conclave::inline v0 {

void PlacementSwitch::make_room(const CudaWeights& live, DeviceAllocator& allocator,
                                cudaStream_t stream) {
  const auto make = [&](const DeviceMemory& like, Table& table) {
    if (like.empty() || !table.memory.empty()) return;
    table.memory = DeviceMemory(allocator, like.bytes(), to_stream(stream), "next placement");
  };
  make(live.local_expert, local_expert_);
  make(live.replica_first, replica_first_);
  make(live.replicas, replicas_);
}

void PlacementSwitch::stage(const std::vector<int32_t>& values, Table& table, cudaStream_t stream) {
  if (table.memory.empty()) return;
  table.bytes = values.size() * sizeof(int32_t);
  if (table.bytes == 0) return;
  cuda::check(cudaMemcpyAsync(table.memory.as(), values.data(), table.bytes, cudaMemcpyHostToDevice,
                              stream),
              "cudaMemcpyAsync");
}

void PlacementSwitch::prepare(const CudaPlan& plan,
                              const std::shared_ptr<const PlacementEpoch>& next,
                              cudaStream_t stream) {
  const PlacementTables tables = placement_tables(plan, *next);
  stage(tables.local_expert, local_expert_, stream);
  stage(tables.replica_first, replica_first_, stream);
  stage(tables.replicas, replicas_, stream);
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  next_ = next;
}

void PlacementSwitch::enter(CudaWeights& live, WeightFence& fence, cudaStream_t stream) const {
  fence.follow_readers(stream);
  const auto copy = [&](const Table& from, const DeviceMemory& to) {
    if (to.empty() || from.bytes == 0) return;
    cuda::check(
        cudaMemcpyAsync(to.as(), from.memory.as(), from.bytes, cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
  };
  copy(local_expert_, live.local_expert);
  copy(replica_first_, live.replica_first);
  copy(replicas_, live.replicas);
  fence.publish(stream);
  live.epoch = next_;
}

}  // namespace conclave::inline v0
