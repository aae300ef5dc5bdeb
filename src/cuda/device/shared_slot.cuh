// The id and the weight in a token's slot of a shared expert.
#pragma once

#include "core/device_flow.h"

#include <cstdint>

namespace conclave::inline v0::cuda::device {

struct SharedSlot {
  int32_t id;
  float weight;
};

// Slot `index`, 0 to count - 1, of a live token.
__device__ __forceinline__ SharedSlot shared_slot(const SharedSlots& shared, int64_t token,
                                                  int32_t index) {
  float weight = shared.constant;
  if (shared.factor != nullptr) {
    weight = shared.factor[token * shared.factors + index / shared.slices];
    if (shared.is_logit) weight = 1.0F / (1.0F + expf(-weight));
  }
  return {shared.first_id + index, weight};
}

}  // namespace conclave::inline v0::cuda::device
