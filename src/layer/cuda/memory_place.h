// Whether a pointer that was given as device memory is that.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {

// Throws Error(kDevice) naming `name` where `data` is host memory or memory of another device than
// cuda:`ordinal`. Null passes. Only the first byte is looked at.
void check_place(std::string_view name, const void* data, int32_t ordinal);

}  // namespace conclave::inline v0
