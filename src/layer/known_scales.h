// Says what a source's scales are for sure, by the types that it has them in.
#pragma once

#include "conclave/spec.h"
#include "conclave/weights.h"

namespace conclave::inline v0 {

// The spec, with QuantSpec::scale_values of the source where it promises nothing yet and all scales
// are powers of two, or numbers of e4m3.
MoeSpec with_known_scales(const MoeSpec& spec, const WeightSource& source);

}  // namespace conclave::inline v0
