// An engine lends this to those who move a layer's experts.
#pragma once

#include "layer/migration/move_slabs.h"

#include "conclave/weights.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace conclave::inline v0 {

class DeviceMover;

struct MovableExperts {
  // With a temporary place behind the others, if asked for; it is there until it is asked for the
  // memory without.
  std::function<PlaceMemory(bool with_temporary)> memory;
  // Writes every byte that kernels read of the slabs.
  std::function<void(const WeightSource& source, int32_t expert, std::span<std::byte> gate_up,
                     std::span<std::byte> down)>
      pack;
  // Ranks must have these in common: packed layout and slab sizes.
  int64_t layout_key = 0;
  // Null where places lie in memory of the host. With it `memory` has no slabs to give, and `pack`
  // is not called.
  std::shared_ptr<DeviceMover> device = {};
};

}  // namespace conclave::inline v0
