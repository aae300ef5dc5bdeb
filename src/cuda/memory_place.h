// The memory that pointers of callers lie in.
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

// Whether a device copies host memory by itself, without a copy by the host first.
bool is_pinned(const void* data);

}  // namespace conclave::inline v0::cuda
