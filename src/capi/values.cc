#include "capi/values.h"

#include "conclave/c/base.h"
#include "conclave/c/tensor.h"
#include "conclave/error.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>

namespace conclave::inline v0::capi {
namespace {

std::optional<DType> find_dtype(int32_t dtype) noexcept {
  if (dtype < 1 || dtype > std::numeric_limits<uint8_t>::max()) return std::nullopt;
  const auto found = static_cast<DType>(dtype - 1);
  return bit_size(found) == 0 ? std::nullopt : std::optional(found);
}

}  // namespace

void check_choice(const char* name, int32_t value, int32_t last) {
  if (value >= 0 && value <= last) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "a field has no such value",
                                            .tensor = name,
                                            .found = std::to_string(value),
                                            .limit = "0 to " + std::to_string(last)});
}

DType dtype_of(const char* name, int32_t dtype) {
  if (const std::optional<DType> found = find_dtype(dtype)) return *found;
  throw Error(ErrorCode::kDType, {.what = "no type has this number",
                                  .tensor = name,
                                  .expected = "a CONCLAVE_DTYPE",
                                  .found = std::to_string(dtype)});
}

std::chrono::nanoseconds timeout_of(const char* name, int64_t milliseconds,
                                    std::chrono::nanoseconds unset) {
  // Longer than any job runs, and far below what nanoseconds can say.
  constexpr int64_t kMost = 1'000'000'000'000;
  if (milliseconds < 0 || milliseconds > kMost) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a deadline is a number of milliseconds",
                                              .tensor = name,
                                              .found = std::to_string(milliseconds),
                                              .limit = "0 to " + std::to_string(kMost)});
  }
  return milliseconds == 0 ? unset : std::chrono::milliseconds(milliseconds);
}

void check_position(ErrorCode code, size_t position, size_t count, const char* what) {
  if (position < count) return;
  throw Error(code, {.what = "a position is beyond the last",
                     .tensor = "position",
                     .found = std::to_string(position),
                     .limit = std::to_string(count) + " " + what});
}

char* copy_text(std::string_view text) {
  auto* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.data(), text.size());
  copy[text.size()] = '\0';
  return copy;
}

}  // namespace conclave::inline v0::capi

void conclave_text_free(char* text) noexcept { std::free(text); }

const char* conclave_dtype_name(conclave_dtype dtype) noexcept {
  const auto found = conclave::capi::find_dtype(dtype);
  // Names are literals, which end with a zero byte.
  return found ? conclave::to_string(*found).data() : "unknown";
}
