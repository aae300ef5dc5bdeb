// Weights that every rank of a layer has whole, as bytes for a rank that joins: shared experts,
// the residual MLP, the router and other dense weights.
#pragma once

#include "layer/packed_weights.h"
#include "layer/plan.h"

#include "conclave/context.h"

#include <cstddef>
#include <span>
#include <vector>

namespace conclave::inline v0 {

std::vector<std::byte> bytes_of_rest(const PackedWeights& weights);

// Fills weights of allocate_weights from the bytes of a rank with the same form. What this rank's
// spec does not have is passed over. Throws Error: kTensorMissing for what the other rank lacks,
// kTensorShape where bytes are not those of such weights, kOutOfMemory.
void read_rest(std::span<const std::byte> bytes, const Context& context, const LayerPlan& plan,
               PackedWeights& weights);

}  // namespace conclave::inline v0
