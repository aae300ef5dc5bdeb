#include "io/gguf/cursor.h"

#include "io/safetensors_rules.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::inline v0::io {

void GgufCursor::require(uint64_t bytes, const char* what) const {
  if (bytes <= remaining()) return;
  throw Error(ErrorCode::kGgufTruncatedHeader,
              {.what = fmt::format("the file ends within {}", what),
               .file = std::string(file_),
               .expected = fmt::format("{} bytes from offset {} on", bytes, offset()),
               .found = fmt::format("{} bytes", remaining()),
               .hint = kDamagedFileHint});
}

void GgufCursor::take(std::span<std::byte> destination, const char* what) {
  constexpr uint64_t kWindowBytes = uint64_t{1} << 18;
  require(destination.size(), what);
  while (!destination.empty()) {
    if (used_ == window_.size()) {
      window_begin_ += used_;
      used_ = 0;
      window_.resize(std::min(kWindowBytes, file_bytes_ - window_begin_));
      read_(window_begin_, window_);
    }
    const size_t bytes = std::min(destination.size(), window_.size() - used_);
    std::copy_n(window_.begin() + static_cast<std::ptrdiff_t>(used_), bytes, destination.begin());
    used_ += bytes;
    destination = destination.subspan(bytes);
  }
}

void GgufCursor::skip(uint64_t bytes, const char* what) {
  require(bytes, what);
  const uint64_t in_window = std::min<uint64_t>(bytes, window_.size() - used_);
  used_ += in_window;
  if (in_window == bytes) return;
  window_begin_ += used_ + (bytes - in_window);
  window_.clear();
  used_ = 0;
}

uint64_t GgufCursor::string_bytes(const char* what, uint64_t limit) {
  const uint64_t begin = offset();
  const auto bytes = number<uint64_t>(what);
  if (bytes <= limit && bytes <= remaining()) return bytes;
  throw Error(ErrorCode::kGgufString,
              {.what = fmt::format("the length of {} at offset {} is out of range", what, begin),
               .file = std::string(file_),
               .found = fmt::format("{} bytes", bytes),
               .limit = fmt::format("{} bytes", std::min(limit, remaining())),
               .hint = kDamagedFileHint});
}

std::string GgufCursor::string(const char* what, uint64_t limit) {
  std::string text(string_bytes(what, limit), '\0');
  take(std::as_writable_bytes(std::span(text)), what);
  return text;
}

void GgufCursor::skip_string(const char* what, uint64_t limit) {
  skip(string_bytes(what, limit), what);
}

}  // namespace conclave::inline v0::io
