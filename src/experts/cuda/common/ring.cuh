// The place of a role in a ring of shared memory that others fill or empty.
#pragma once

#include <cstdint>

namespace conclave::inline v0::experts {

inline constexpr int kSlotsAtRunTime = 0;

// `phase` flips on every turn, as the barriers of the ring's slots do.
template <int kSlots = kSlotsAtRunTime>
struct RingPosition {
  int32_t slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance()
    requires(kSlots != kSlotsAtRunTime)
  {
    advance(kSlots);
  }
  __device__ __forceinline__ void advance(int32_t slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The phase of each slot in a bit of its own, for loops in which slots are constants.
struct RingPhases {
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t of(int32_t slot) const { return (bits >> slot) & 1; }
  __device__ __forceinline__ void flip(int32_t slot) { bits ^= 1U << slot; }
};

}  // namespace conclave::inline v0::experts
