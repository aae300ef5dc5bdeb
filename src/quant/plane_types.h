// The types that elements of a plane may have in files and sources.
#pragma once

#include "quant/planes.h"

#include "conclave/dtype.h"

#include <span>
#include <string>

namespace conclave::inline v0::quant {

// The usual type first; empty for PlaneType::kWeights, whose type the matrix has.
std::span<const DType> types_of(PlaneType type);
// "F32 or F16 or BF16": for messages.
std::string show_types(std::span<const DType> types);

}  // namespace conclave::inline v0::quant
