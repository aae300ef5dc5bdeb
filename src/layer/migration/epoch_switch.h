// The placement epoch that a layer is in, and the next one while experts are on their way to it.
// Forwards read and switch it, a migration prepares what comes next.
#pragma once

#include "placement/epoch.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace conclave::inline v0 {

using EpochPointer = std::shared_ptr<const PlacementEpoch>;

// Those who change a layer's weights or their places, one at a time.
enum class Claimant : uint8_t { kMigration, kRefit };

// A rank brings these to the agreement of a forward.
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

  // Throws Error(kState) if someone else has claimed it.
  void claim(Claimant claimant = Claimant::kMigration);
  void release();  // also withdraws what is prepared
  bool is_claimed() const;
  // Throws as claim would.
  void check_unclaimed() const;
  // Throws Error(kState) while experts are on their way, or, without `refits_pass`, while a refit
  // is under way.
  void check_at_rest(bool refits_pass = false) const;

  // Keeps a layer whose experts are read in place of a forward from being claimed by a migration.
  class Hold {
   public:
    explicit Hold(EpochSwitch& epochs);
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold();

   private:
    EpochSwitch& epochs_;
  };

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
  std::optional<Claimant> claimed_;
  int32_t holds_ = 0;
};

// Releases what it has claimed.
class EpochClaim {
 public:
  explicit EpochClaim(EpochSwitch& epochs, Claimant claimant = Claimant::kMigration)
      : epochs_(epochs) {
    epochs_.claim(claimant);
  }
  EpochClaim(const EpochClaim&) = delete;
  EpochClaim& operator=(const EpochClaim&) = delete;
  ~EpochClaim() { epochs_.release(); }

 private:
  EpochSwitch& epochs_;
};

}  // namespace conclave::inline v0
