// One way from a layer's placement to another, round by round: agreement on the request, copies,
// comparison of hashes. It decides nothing about when a layer takes an epoch up.
#pragma once

#include "layer/agreed_values.h"
#include "layer/migration/epoch_switch.h"
#include "layer/migration/movable_experts.h"
#include "layer/migration/pace.h"
#include "placement/moves.h"

#include "conclave/comm.h"
#include "conclave/migration.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Throws Error(kInvalidArgument) naming the field.
void check_migration_options(const MigrationOptions& options);

// Ranks must have these in common before they move experts. `valid`: this rank can do as asked.
std::vector<AgreedValue> request_values(bool valid, const PlacementEpoch& from,
                                        const ExpertSlots& slots, const MovableExperts& experts,
                                        const MigrationOptions& options);

struct RoundsRequest {
  EpochPointer from;
  const ExpertSlots& slots;
  const MovableExperts& experts;
  const MigrationOptions& options;
  int32_t rank = 0;
  Communicator* communicator = nullptr;  // null: this rank alone
  bool with_temporary = false;
  double processor_share = 1;
  const std::atomic<bool>& stopped;
};

class MoveRounds {
 public:
  // Plans. Throws as plan_moves.
  explicit MoveRounds(const RoundsRequest& request);

  int64_t size() const { return static_cast<int64_t>(rounds_.size()); }
  int64_t num_done() const { return done_.load(std::memory_order_relaxed); }
  int64_t experts_moved() const { return moved_.load(std::memory_order_relaxed); }
  bool is_done() const { return num_done() == size(); }
  bool needs_temporary() const;

  // Collective: throws CommError(kCommMismatch) on every rank where one's request differs.
  void agree() const;
  // Collective: copies the experts of the next round and compares the hashes of both ends. Returns
  // its epoch. Throws on every rank: CommError(kCommMismatch) naming the rank at the other end,
  // CommError(kCommAborted) where another rank failed, what the source threw on this one.
  EpochPointer copy_next();
  // After copy_next has thrown: every rank of the communicator has seen that, and it still serves.
  bool peers_know() const { return peers_know_; }

 private:
  void copy_wave(std::span<const ExpertMove> moves, const PlaceMemory& memory);

  EpochPointer from_;
  ExpertSlots slots_;
  MovableExperts experts_;
  MigrationOptions options_;
  int32_t rank_;
  Communicator* communicator_;
  const std::atomic<bool>& stopped_;
  std::vector<MoveRound> rounds_;
  std::optional<Pace> pace_;  // measures the thread that copies
  double processor_share_;
  bool peers_know_ = false;
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> moved_{0};
};

}  // namespace conclave::inline v0
