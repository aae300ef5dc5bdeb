// Numbers and texts of callers as values of the library, and back.
#pragma once

#include "conclave/dtype.h"
#include "conclave/error.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::inline v0::capi {

// More physical experts than any layer has.
inline constexpr size_t kMostExperts = size_t{1} << 24;

// Throws Error(kInvalidArgument) naming the field unless 0 <= value <= last.
void check_choice(const char* name, int32_t value, int32_t last);

// The enumerator of that number, which is the same in both interfaces.
template <class Enum>
Enum choice_of(const char* name, int32_t value, Enum last) {
  check_choice(name, value, static_cast<int32_t>(last));
  return static_cast<Enum>(value);
}

// Types of C are numbered from 1, since 0 is "not given". Throws Error(kDType) naming the field.
DType dtype_of(const char* name, int32_t dtype);
constexpr int32_t to_c(DType dtype) noexcept { return static_cast<int32_t>(dtype) + 1; }

// Milliseconds, 0 standing for `unset`. Throws Error(kInvalidArgument) naming the field.
std::chrono::nanoseconds timeout_of(const char* name, int64_t milliseconds,
                                    std::chrono::nanoseconds unset = std::chrono::seconds(30));

// NULL is empty.
inline std::string text_of(const char* text) { return text == nullptr ? "" : text; }
// Throws Error(code) naming the position unless it is below `count`; `what` says of which things.
void check_position(ErrorCode code, size_t position, size_t count, const char* what);

// A copy that conclave_text_free frees. Throws std::bad_alloc.
char* copy_text(std::string_view text);

}  // namespace conclave::inline v0::capi
