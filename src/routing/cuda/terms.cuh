// A softmax over any number of terms: each lane visits every 32nd.
#pragma once

#include "routing/cuda/score.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

// `term(i)` gives term i of `count`, absent() if there is none; Softmax::weight_of gives its share.
// Runs on a whole warp.
template <class Term>
__device__ __forceinline__ Softmax softmax_of_terms(int32_t count, const Term& term) {
  Softmax softmax{absent(), 0, 0};
  for (int32_t i = lane_id(); i < count; i += 32) {
    const double value = term(i);
    softmax.max = value > softmax.max ? value : softmax.max;
    softmax.infinite += value == CUDART_INF ? 1 : 0;
  }
  softmax.max = warp_max(softmax.max);
  softmax.infinite = __reduce_add_sync(kFullWarp, softmax.infinite);
  if (!present(softmax.max) || softmax.infinite != 0) return softmax;
  double sum = 0;
  for (int32_t i = lane_id(); i < count; i += 32) {
    const double value = term(i);
    if (present(value)) sum += exp_to_weigh(value - softmax.max);
  }
  softmax.sum = warp_sum(sum);
  return softmax;
}

}  // namespace conclave::inline v0::routing::device
