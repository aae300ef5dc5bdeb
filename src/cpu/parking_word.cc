#include "cpu/parking_word.h"

#include <climits>
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace conclave::inline v0::cpu {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads a plain word");

// Calls `done` until it is true or the time is over; returns whether it became true.
template <class Done>
bool spin_until(const Done& done, std::chrono::nanoseconds spin) noexcept {
  using Clock = std::chrono::steady_clock;
  if (done()) return true;
  if (spin.count() <= 0) return false;
  const auto deadline = Clock::now() + spin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      _mm_pause();
    }
  } while (Clock::now() < deadline);
  return done();
}

}  // namespace

uint32_t ParkingWord::add(uint32_t amount) noexcept {
  const uint32_t value = value_.fetch_add(amount, std::memory_order_seq_cst) + amount;
  wake_sleepers();
  return value;
}

void ParkingWord::count_down() noexcept {
  if (value_.fetch_sub(1, std::memory_order_seq_cst) == 1) wake_sleepers();
}

uint32_t ParkingWord::wait_while(uint32_t value, std::chrono::nanoseconds spin) noexcept {
  if (!spin_until([&] { return load() != value; }, spin)) {
    while (load() == value) sleep_while(value);
  }
  return load();
}

void ParkingWord::wait_for_zero(std::chrono::nanoseconds spin) noexcept {
  if (spin_until([&] { return load() == 0; }, spin)) return;
  for (uint32_t value = load(); value != 0; value = load()) sleep_while(value);
}

// Sequential consistency of both words makes a lost wake-up impossible: either the waker sees the
// sleeper, or the sleeper (or the kernel, comparing again) sees the new value.
void ParkingWord::sleep_while(uint32_t value) noexcept {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (value_.load(std::memory_order_seq_cst) == value) {
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void ParkingWord::wake_sleepers() noexcept {
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace conclave::inline v0::cpu
