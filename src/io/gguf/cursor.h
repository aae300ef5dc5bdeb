// Reads a GGUF header from front to back, a piece of the file at a time. What a header claims about
// itself never decides how much memory is asked for.
#pragma once

#include "conclave/error.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::io {

// Fills a span with the file's bytes from an offset on; both lie within the file.
using ReadBytes = std::function<void(uint64_t offset, std::span<std::byte> destination)>;

class GgufCursor {
 public:
  GgufCursor(ReadBytes read, uint64_t file_bytes, std::string_view file)
      : read_(std::move(read)), file_bytes_(file_bytes), file_(file) {}

  uint64_t offset() const noexcept { return window_begin_ + used_; }
  uint64_t remaining() const noexcept { return file_bytes_ - offset(); }
  std::string_view file() const noexcept { return file_; }

  // A little-endian number. `what` names it in the error that says that the file ends.
  template <class T>
  T number(const char* what) {
    std::array<std::byte, sizeof(T)> bytes;
    take(bytes, what);
    T value;
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  // A length of 64 bits and so many bytes. Throws Error(kGgufString) above `limit`.
  std::string string(const char* what, uint64_t limit);
  void skip_string(const char* what, uint64_t limit);
  void skip(uint64_t bytes, const char* what);

 private:
  uint64_t string_bytes(const char* what, uint64_t limit);
  void require(uint64_t bytes, const char* what) const;
  void take(std::span<std::byte> destination, const char* what);

  ReadBytes read_;
  uint64_t file_bytes_;
  std::string_view file_;
  std::vector<std::byte> window_;  // the file's bytes from window_begin_ on
  uint64_t window_begin_ = 0;
  size_t used_ = 0;
};

}  // namespace conclave::inline v0::io
