#include "layer/migration/epoch_switch.h"

#include "conclave/error.h"

#include <utility>

namespace conclave::inline v0 {

EpochPointer EpochSwitch::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

EpochOffer EpochSwitch::offer() const {
  const std::lock_guard lock(mutex_);
  if (!current_->places.is_addressable()) {
    throw Error(ErrorCode::kState,
                {.what = "a placement update without spare places ended midway: some expert lies "
                         "in a temporary place",
                 .hint = "call update_placement again"});
  }
  return {.current = current_, .next = next_};
}

EpochPointer EpochSwitch::take(const EpochOffer& offer, uint64_t agreed) {
  if (agreed == offer.current->number) return offer.current;
  {
    const std::lock_guard lock(mutex_);
    current_ = offer.next;
    if (next_ == offer.next) next_ = nullptr;
  }
  changed_.notify_all();
  return offer.next;
}

void EpochSwitch::claim() {
  const std::lock_guard lock(mutex_);
  if (claimed_) {
    throw Error(ErrorCode::kState, {.what = "experts of this layer are on their way already",
                                    .hint = "finish or destroy the migration first"});
  }
  claimed_ = true;
}

void EpochSwitch::release() {
  const std::lock_guard lock(mutex_);
  claimed_ = false;
  next_ = nullptr;
}

bool EpochSwitch::is_claimed() const {
  const std::lock_guard lock(mutex_);
  return claimed_;
}

void EpochSwitch::prepare(EpochPointer next) {
  {
    const std::lock_guard lock(mutex_);
    next_ = std::move(next);
  }
  changed_.notify_all();
}

void EpochSwitch::await_taken(uint64_t number, const std::function<bool()>& stopped) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return current_->number >= number || stopped(); });
}

void EpochSwitch::wake() const {
  // The lock keeps a waiter from missing what was set before.
  { const std::lock_guard lock(mutex_); }
  changed_.notify_all();
}

}  // namespace conclave::inline v0
