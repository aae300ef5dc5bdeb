#include "checkpoint/layer_shapes.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {

LayerShapes layer_shapes(const MoeSpec& spec) {
  MoeSpec stored = spec;
  stored.has_gate = true;
  LayerShapes shapes;
  for (const WeightShape& shape : layer_weights(stored)) {
    shapes[shape.id] = shape;
    shapes[shape.id].is_optional = shape.is_optional || !spec.has_gate;
  }
  for (const WeightShape& shape : layer_weights(spec)) shapes[shape.id] = shape;
  return shapes;
}

bool has_all(const LayerShapes& shapes, std::span<const WeightId> ids) {
  return std::ranges::all_of(ids, [&](WeightId id) { return shapes[id].count > 0; });
}

}  // namespace conclave::inline v0::checkpoint
