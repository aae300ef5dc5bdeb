// A number that copies and moves like one, and may be read while another thread writes it.
#pragma once

#include "conclave/version.h"

#include <atomic>
#include <cstdint>

namespace conclave::inline v0 {

class RelaxedCount {
 public:
  RelaxedCount() = default;
  RelaxedCount(int64_t value) noexcept : value_(value) {}
  RelaxedCount(const RelaxedCount& other) noexcept : value_(other.get()) {}
  RelaxedCount& operator=(const RelaxedCount& other) noexcept {
    value_.store(other.get(), std::memory_order_relaxed);
    return *this;
  }

  int64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

}  // namespace conclave::inline v0
