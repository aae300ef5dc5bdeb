// A source's weights in device memory, in the layout that layers use in place: made once, then any
// number of layers over them cost nothing.
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
  // Throws Error(kDevice): nothing here is the host's.
  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;

 private:
  // Matrices of a role: from `data` on, `stride_bytes` apart.
  struct Role {
    WeightInfo info;
    std::byte* data = nullptr;
    int64_t stride_bytes = 0;
  };

  const Role& at(WeightRole role) const { return roles_[static_cast<size_t>(role)]; }
  Role& at(WeightRole role) { return roles_[static_cast<size_t>(role)]; }
  // Gate rows, then up rows, of one expert after the other.
  void place_gate_and_up();
  void place(WeightRole role);
  void fill(WeightRole role, const WeightSource& source);

  const DeviceQueue& queue_;
  std::array<Role, kNumWeightRoles> roles_;
  std::vector<DeviceTensor> tensors_;
};

}  // namespace conclave::tool
