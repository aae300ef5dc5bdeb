// XXH3-64 of a rank's packed weights, whatever the order of their places.
#pragma once

#include "layer/packed_weights.h"
#include "layer/plan.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// `places`: the expert in each, -1 for a free one.
uint64_t content_hash(const LayerPlan& plan, const PackedWeights& weights,
                      std::span<const int32_t> places);

}  // namespace conclave::inline v0
