// Tells types that hold values from types of codes, as the library's is_plain does.
#pragma once

#include "conclave/dtype.h"

namespace conclave::tool {

constexpr bool holds_values(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace conclave::tool
