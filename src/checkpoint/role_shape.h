// The number and size of the matrices that a layer has in each role.
#pragma once

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>

namespace conclave::inline v0::checkpoint {

struct RoleShape {
  int64_t count = 0;  // 0: the layer has no such matrix
  int64_t rows = 0;
  int64_t cols = 0;
  bool is_vector = false;  // rows = 1 by definition; stored with one axis
  bool is_optional = false;
};

// The sizes are those that conclave/weights.h gives for a layer that owns its gate. The sizes in
// `spec` must have been checked: none exceeds 2^20.
RoleShape role_shape(const MoeSpec& spec, WeightRole role);

}  // namespace conclave::inline v0::checkpoint
