#include "layer/refit/forward_gate.h"

#include "cpu/fork_count.h"

#include "conclave/error.h"

namespace conclave::inline v0 {

ForwardGate::ForwardGate() : fork_count_(cpu::fork_count()) {}

void ForwardGate::check_process() const {
  if (cpu::fork_count() == fork_count_) return;
  throw Error(ErrorCode::kForked,
              {.what = "a layer whose weights were changing was used in a forked child",
               .hint = "create the context and its layers after fork"});
}

void ForwardGate::enter() {
  uint32_t seen = state_.load(std::memory_order_relaxed);
  while (true) {
    if ((seen & kClosed) != 0) {
      check_process();
      state_.wait(seen, std::memory_order_relaxed);
      seen = state_.load(std::memory_order_relaxed);
    } else if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                            std::memory_order_relaxed)) {
      return;
    }
  }
}

void ForwardGate::leave() noexcept {
  const uint32_t before = state_.fetch_sub(1, std::memory_order_release);
  if (before == (kClosed | 1U)) state_.notify_all();
}

void ForwardGate::close() {
  uint32_t seen = state_.load(std::memory_order_relaxed);
  while (true) {
    if (seen != 0) check_process();
    if ((seen & kClosed) != 0) {
      state_.wait(seen, std::memory_order_relaxed);
      seen = state_.load(std::memory_order_relaxed);
    } else if (state_.compare_exchange_weak(seen, seen | kClosed, std::memory_order_acquire,
                                            std::memory_order_relaxed)) {
      break;
    }
  }
  for (seen = state_.load(std::memory_order_acquire); seen != kClosed;
       seen = state_.load(std::memory_order_acquire)) {
    state_.wait(seen, std::memory_order_relaxed);
  }
}

void ForwardGate::open() noexcept {
  state_.store(0, std::memory_order_release);
  state_.notify_all();
}

}  // namespace conclave::inline v0
