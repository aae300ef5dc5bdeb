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
  // Copies every role of `source`. `queue` must outlive this.
  DeviceWeights(const DeviceQueue& queue, const WeightSource& source);

  WeightInfo describe(WeightRole role) const override { return at(role).info; }
  ConstTensorView view(WeightRole role, int64_t expert) const override;
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  // Throws Error(kDevice), because nothing here is in host memory.
  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;

 private:
  // The matrices of a role start at `data` and are `stride_bytes` apart.
  struct Role {
    WeightInfo info;
    std::byte* data = nullptr;
    int64_t stride_bytes = 0;
  };

  const Role& at(WeightRole role) const { return roles_[static_cast<size_t>(role)]; }
  Role& at(WeightRole role) { return roles_[static_cast<size_t>(role)]; }
  // For each expert, the gate rows come first, then the up rows.
  void place_gate_and_up();
  void place(WeightRole role);
  void fill(WeightRole role, const WeightSource& source);

  const DeviceQueue& queue_;
  std::array<Role, kNumWeightRoles> roles_;
  std::vector<DeviceTensor> tensors_;
};

}  // namespace conclave::tool
