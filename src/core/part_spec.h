// These checks are of the parts that a layer has besides its routed experts and its router.
#pragma once

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0 {

// No model has more, and products of three sizes and an element size stay inside 63 bits.
inline constexpr int64_t kMaxSpecSize = int64_t{1} << 20;

// Checks that each field of shared experts, projection, residual MLP, zero experts, weight_on and
// scales is in range, and that their combination has a meaning. Throws Error(kInvalidArgument)
// naming the field, the value and the limit.
void validate_parts(const MoeSpec& spec);

// The activation of the shared experts and of the residual MLP: `own`, or the routed experts' if
// `own` has no name.
const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec);

}  // namespace conclave::inline v0
