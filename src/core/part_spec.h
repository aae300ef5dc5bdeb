// The checks of what a layer has beside its routed experts and its router.
#pragma once

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// Beyond any model there is, and small enough that products of three sizes and an element size stay
// inside 63 bits.
inline constexpr int64_t kMaxSpecSize = int64_t{1} << 20;

// Shared experts, projection, residual MLP, zero experts, where weights apply, scales: each field
// in its range, and no combination without a meaning. Throws Error(kInvalidArgument) naming the
// field, the value and the limit.
void validate_parts(const MoeSpec& spec);

}  // namespace conclave::inline v0
