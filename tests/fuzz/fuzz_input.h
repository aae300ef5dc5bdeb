// Takes an input of a fuzzer apart, from the front.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::testing {

class FuzzInput {
 public:
  explicit FuzzInput(std::span<const std::byte> bytes) : rest_(bytes) {}

  // The next byte; 0 behind the end.
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = std::to_integer<uint8_t>(rest_.front());
    rest_ = rest_.subspan(1);
    return value;
  }
  // One of the numbers below `count`.
  size_t below(size_t count) { return byte() % count; }
  // The bytes up to a NUL, which goes too.
  std::string text() {
    const auto end = std::ranges::find(rest_, std::byte{0});
    const auto bytes = static_cast<size_t>(end - rest_.begin());
    const std::string text(reinterpret_cast<const char*>(rest_.data()), bytes);
    rest_ = rest_.subspan(std::min(bytes + 1, rest_.size()));
    return text;
  }
  std::span<const std::byte> rest() const { return rest_; }

 private:
  std::span<const std::byte> rest_;
};

// The bytes of a larger thing than the input: they repeat. Zeros without any.
inline void fill_from(std::span<const std::byte> pool, size_t first,
                      std::span<std::byte> destination) {
  std::ranges::fill(destination, std::byte{0});
  for (size_t at = 0; !pool.empty() && at < destination.size();) {
    const size_t from = (first + at) % pool.size();
    const size_t count = std::min(pool.size() - from, destination.size() - at);
    std::copy_n(pool.begin() + static_cast<std::ptrdiff_t>(from), count,
                destination.begin() + static_cast<std::ptrdiff_t>(at));
    at += count;
  }
}

}  // namespace conclave::testing
