// A lock for long turns that a forked child takes although a thread of its parent held it: that
// thread is not in the child.
#pragma once

#include "cpu/fork_count.h"

#include <atomic>
#include <cstdint>

namespace conclave::inline v0::cpu {

class Turn {
 public:
  void lock() noexcept {
    const uint32_t own = name();
    uint32_t held = kFree;
    while (!held_by_.compare_exchange_weak(held, own, std::memory_order_acquire)) {
      if (held == own) held_by_.wait(held, std::memory_order_relaxed);
      // Else it is free, or its holder was left behind by fork.
      if (held == own) held = kFree;
    }
  }
  void unlock() noexcept {
    held_by_.store(kFree, std::memory_order_release);
    held_by_.notify_one();
  }

 private:
  static constexpr uint32_t kFree = 0;
  // A process writes a name here that none of its ancestors writes.
  static uint32_t name() noexcept { return static_cast<uint32_t>(fork_count()) + 1; }

  std::atomic<uint32_t> held_by_{kFree};
};

}  // namespace conclave::inline v0::cpu
