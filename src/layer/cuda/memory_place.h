// Checks that a pointer given as device memory is device memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {

// Throws Error(kDevice) naming `name` if `data` is host memory or memory of a device other than
// cuda:`ordinal`. Null passes. Only the first byte is checked.
void check_place(std::string_view name, const void* data, int32_t ordinal);

}  // namespace conclave::inline v0
