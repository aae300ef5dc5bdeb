// Memory of callers that a call writes while it reads or writes other memory.
#pragma once

#include "conclave/tensor.h"

#include <string_view>

namespace conclave::inline v0 {

// Throws Error(kOverlap) naming both where the output, from its first element to the end of its
// last, shares bytes with the other. Sizes have been checked; a view without memory shares none.
void check_disjoint(std::string_view output_name, const ConstTensorView& output,
                    std::string_view other_name, const ConstTensorView& other);

}  // namespace conclave::inline v0
