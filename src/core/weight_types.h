// Tells types that hold values from types that hold codes, and how many bytes codes take.
#pragma once

#include "core/checked.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0 {

// Types that hold values. A matrix of any other type holds codes, which mean nothing without
// scales.
constexpr bool is_plain(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// Bytes that `count` codes take side by side, the first at the begin of a byte.
inline int64_t packed_bytes(DType dtype, int64_t count) {
  return ceil_div(count * bit_size(dtype), 8);
}

}  // namespace conclave::inline v0
