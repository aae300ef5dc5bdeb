// The place of a role in a ring of shared memory that others fill or empty.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

// `phase` flips on every turn, as the barriers of the ring's slots do.
template <int kSlots>
struct RingPosition {
  int32_t slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

}  // namespace conclave::inline v0::experts
