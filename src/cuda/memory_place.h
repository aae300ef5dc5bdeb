// Checks that a pointer given as device memory is device memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::cuda {

// Throws Error(kDevice) naming `name` if `data` is host memory or memory of a device other than
// cuda:`ordinal`. Null passes. Only the first byte is checked.
void check_place(std::string_view name, const void* data, int32_t ordinal);
// Whether it lies there, managed memory included; false for host memory. Throws for memory of
// another device.
bool is_on_device(std::string_view name, const void* data, int32_t ordinal);

}  // namespace conclave::inline v0::cuda
