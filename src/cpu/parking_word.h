// A 32-bit word that threads wait on: spinning first, then asleep in the kernel.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace conclave::inline v0::cpu {

// Counts the waiters that went to sleep, so that a wake-up without sleepers costs no system call.
class ParkingWord {
 public:
  explicit ParkingWord(uint32_t value = 0) : value_(value) {}
  ParkingWord(const ParkingWord&) = delete;
  ParkingWord& operator=(const ParkingWord&) = delete;

  uint32_t load() const noexcept { return value_.load(std::memory_order_acquire); }
  // Wakes nobody, so no thread may be waiting.
  void reset(uint32_t value) noexcept { value_.store(value, std::memory_order_release); }
  // Adds, wakes every waiter and returns the new value.
  uint32_t add(uint32_t amount) noexcept;
  // Subtracts one; wakes every waiter when the word becomes zero.
  void count_down() noexcept;

  // wait_while returns the word once it differs from `value`; wait_for_zero returns once it is
  // zero.
  uint32_t wait_while(uint32_t value, std::chrono::nanoseconds spin) noexcept;
  void wait_for_zero(std::chrono::nanoseconds spin) noexcept;

 private:
  void sleep_while(uint32_t value) noexcept;
  void wake_sleepers() noexcept;

  std::atomic<uint32_t> value_;
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace conclave::inline v0::cpu
