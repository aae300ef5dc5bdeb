// The placement epoch that a layer is in, and the next one while experts are on their way to it.
// Forwards read and switch it, a migration prepares what comes next.
#pragma once

#include "placement/epoch.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace conclave::inline v0 {

using EpochPointer = std::shared_ptr<const PlacementEpoch>;

// What a rank brings to the agreement of a forward.
struct EpochOffer {
  EpochPointer current;
  EpochPointer next;  // null: nothing is ready here

  uint64_t ready() const { return next != nullptr ? next->number : current->number; }
};

class EpochSwitch {
 public:
  explicit EpochSwitch(EpochPointer first) : current_(std::move(first)) {}

  EpochPointer current() const;
  // Throws Error(kState) while an expert lies in a temporary place.
  EpochOffer offer() const;
  // Takes up the epoch that all ranks agreed on, and returns it.
  EpochPointer take(const EpochOffer& offer, uint64_t agreed);

  // One migration at a time. Throws Error(kState) if one is under way.
  void claim();
  void release();  // also withdraws what is prepared
  bool is_claimed() const;

  // For the migration: every move to `next` is done on this rank.
  void prepare(EpochPointer next);
  // Waits until a forward has taken up epoch `number`, or until `stopped` and wake().
  void await_taken(uint64_t number, const std::function<bool()>& stopped) const;
  void wake() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  EpochPointer current_;
  EpochPointer next_;
  bool claimed_ = false;
};

}  // namespace conclave::inline v0
