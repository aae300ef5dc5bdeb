#include "layer/migration/epoch_switch.h"

#include "conclave/error.h"

#include <utility>

namespace conclave::inline v0 {
namespace {

void check_addressable(const PlacementEpoch& epoch) {
  if (epoch.places.is_addressable()) return;
  throw Error(ErrorCode::kState,
              {.what = "a placement update without spare places ended midway: some expert lies "
                       "in a temporary place",
               .hint = "call update_placement again"});
}

[[noreturn]] void refuse(Claimant claimant) {
  if (claimant == Claimant::kRefit) {
    throw Error(ErrorCode::kState, {.what = "a refit of this layer is under way",
                                    .hint = "commit it or roll it back first"});
  }
  throw Error(ErrorCode::kState, {.what = "experts of this layer are on their way already",
                                  .hint = "finish or destroy the migration first"});
}

}  // namespace

EpochPointer EpochSwitch::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

EpochOffer EpochSwitch::offer() const {
  const std::lock_guard lock(mutex_);
  check_addressable(*current_);
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

void EpochSwitch::claim(Claimant claimant) {
  const std::lock_guard lock(mutex_);
  if (claimed_) refuse(*claimed_);
  if (holds_ > 0 && claimant == Claimant::kMigration) {
    throw Error(ErrorCode::kState, {.what = "the contents of this layer are being read",
                                    .hint = "move its experts afterwards"});
  }
  claimed_ = claimant;
}

void EpochSwitch::release() {
  const std::lock_guard lock(mutex_);
  claimed_.reset();
  next_ = nullptr;
}

bool EpochSwitch::is_claimed() const {
  const std::lock_guard lock(mutex_);
  return claimed_.has_value();
}

void EpochSwitch::check_unclaimed() const {
  const std::lock_guard lock(mutex_);
  if (claimed_) refuse(*claimed_);
}

void EpochSwitch::check_at_rest(bool refits_pass) const {
  const std::lock_guard lock(mutex_);
  check_addressable(*current_);
  if (claimed_ && !(refits_pass && claimed_ == Claimant::kRefit)) refuse(*claimed_);
}

EpochSwitch::Hold::Hold(EpochSwitch& epochs) : epochs_(epochs) {
  epochs_.check_at_rest(true);
  const std::lock_guard lock(epochs_.mutex_);
  if (epochs_.claimed_ == Claimant::kMigration) refuse(Claimant::kMigration);
  ++epochs_.holds_;
}

EpochSwitch::Hold::~Hold() {
  const std::lock_guard lock(epochs_.mutex_);
  --epochs_.holds_;
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
