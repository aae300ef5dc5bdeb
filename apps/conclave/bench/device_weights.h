// A source's weights in device memory, in the layout that layers use in place: they are copied
// once, and any number of layers over them cost nothing more.
#pragma once

#include "conclave/device_queue.h"
#include "conclave/weights.h"

#include <array>
#include <cstdint>
#include <vector>

namespace conclave::tool {

class DeviceWeights final : public WeightSource {
 public:
  // Copies all weights of `source`. `queue` must outlive this.
  DeviceWeights(const DeviceQueue& queue, const WeightSource& source);

  WeightInfo describe(WeightId id) const override { return at(id).info; }
  ConstTensorView view(WeightId id, int64_t expert) const override;
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  // Throws Error(kDevice), because nothing here is in host memory.
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;

 private:
  // The matrices of an id start at `data` and are `stride_bytes` apart.
  struct Matrices {
    WeightInfo info;
    std::byte* data = nullptr;
    int64_t stride_bytes = 0;
  };

  const Matrices& at(WeightId id) const { return matrices_[id]; }
  Matrices& at(WeightId id) { return matrices_[id]; }
  // For each expert, the gate rows come first, then the up rows.
  void place_gate_and_up();
  void place(WeightId id);
  void fill(WeightId id, const WeightSource& source);

  const DeviceQueue& queue_;
  WeightTable<Matrices> matrices_;
  std::vector<DeviceTensor> tensors_;
};

}  // namespace conclave::tool
