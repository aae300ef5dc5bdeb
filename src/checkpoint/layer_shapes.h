// The weights that a checkpoint holds of a layer.
#pragma once

#include "spec/layer_weights.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <span>

namespace conclave::inline v0::checkpoint {

// By id; the count of those that the layer lacks is 0. Includes the router, which is optional if
// the caller routes.
// The sizes in `spec` must have been checked: none exceeds 2^20.
using LayerShapes = WeightTable<WeightShape>;
LayerShapes layer_shapes(const MoeSpec& spec);

// Whether the layer has all of these weights.
bool has_all(const LayerShapes& shapes, std::span<const WeightId> ids);

}  // namespace conclave::inline v0::checkpoint
