// The thread that copies experts while forwards go on.
#pragma once

#include "layer/migration/migrating_layer.h"
#include "layer/migration/move_rounds.h"

#include "conclave/balance.h"
#include "conclave/migration.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

namespace conclave::inline v0 {

// Migration's methods forward to it and share its contract. The worker prepares epochs; a forward,
// or finish(), takes them up.
class MigrationWorker {
 public:
  MigrationWorker(MigratingLayer layer, const ExpertSlots& slots, const MigrationOptions& options);
  MigrationWorker(const MigrationWorker&) = delete;
  MigrationWorker& operator=(const MigrationWorker&) = delete;
  ~MigrationWorker();

  MigrationStatus status() const;
  void check() const;
  void finish();

 private:
  enum class State : uint8_t { kCopying, kReady, kDone, kFailed };

  void run() noexcept;
  void copy_rounds();
  void set(State state, std::exception_ptr failure = nullptr);
  // Waits until a round is ready and not yet taken up, or there is no further one.
  void await_step();
  bool is_taken() const;     // the round that was ready last
  bool is_complete() const;  // the layer is in the last epoch, whether or not the worker knows

  MigratingLayer layer_;
  Communicator& communicator_;  // serves nothing else
  const uint64_t fork_count_;   // a thread is of one process
  std::atomic<bool> stopped_{false};
  std::optional<MoveRounds> rounds_;
  uint64_t first_epoch_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kCopying;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace conclave::inline v0
