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
  std::unique_lock lock(mutex_);
  if (closed_) {
    check_process();
    changed_.wait(lock, [this] { return !closed_; });
  }
  ++under_way_;
}

void ForwardGate::leave() noexcept {
  bool is_awaited = false;
  {
    const std::lock_guard lock(mutex_);
    is_awaited = --under_way_ == 0 && closed_;
  }
  if (is_awaited) changed_.notify_all();
}

void ForwardGate::close() {
  std::unique_lock lock(mutex_);
  if (closed_ || under_way_ != 0) check_process();
  changed_.wait(lock, [this] { return !closed_; });
  closed_ = true;
  changed_.wait(lock, [this] { return under_way_ == 0; });
}

void ForwardGate::open() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = false;
  }
  changed_.notify_all();
}

}  // namespace conclave::inline v0
