// Rows of experts in the last steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

class LoadWindow {
 public:
  // `counters`: of all layers, one after the other.
  LoadWindow(size_t counters, int64_t steps);

  std::span<int64_t> now() noexcept { return now_; }
  std::span<const int64_t> now() const noexcept { return now_; }
  // The rows of the step that is under way are the last ones of the window from now on.
  void close_step();
  // Adds up all steps of the window.
  std::span<const int64_t> sums() const noexcept { return sums_; }

 private:
  std::vector<int64_t> now_;
  std::vector<int64_t> sums_;
  std::vector<int64_t> steps_;  // [window][counters], a ring
  size_t capacity_;
  size_t next_ = 0;
};

}  // namespace conclave::inline v0
