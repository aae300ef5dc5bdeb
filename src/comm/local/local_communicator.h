// One rank of a local group: a thread with its own buffers. Bytes move from the senders' buffers
// into the receivers', by whichever thread comes last or waits; nothing else is shared.
#pragma once

#include "comm/local/local_group.h"
#include "comm/local/operation.h"
#include "comm/local/progress.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group, int32_t rank,
                    std::chrono::nanoseconds timeout);
  LocalCommunicator(const LocalCommunicator&) = delete;
  LocalCommunicator& operator=(const LocalCommunicator&) = delete;
  ~LocalCommunicator() override;

  std::string_view name() const noexcept override { return "local"; }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return group_->size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return timeout_; }
  Support supports(CommFeature feature) const override;

  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override;
  bool test(CommHandle handle, std::string_view phase) override;
  void check(std::string_view phase) override;
  void abort(std::string_view reason) noexcept override;
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override;

 protected:
  CommHandle start(const CommOperation& operation) override;

 private:
  RankState& self() { return group_->rank(rank_); }
  bool usable();
  // Throws if this rank or the group has failed already; nothing of this rank is under way then.
  void check_usable(GroupLock& lock, std::string_view phase);
  // Takes a free entry of this rank, which peers cannot see yet.
  Operation& take_entry();
  // Numbers the operation, so that peers find it.
  CommHandle publish(Operation& operation);
  // Throws if this rank or the group has failed, or never had the operation.
  Operation& operation_of(CommHandle handle, GroupLock& lock, std::string_view phase);

  // Moves what this rank's operations can take. True if anything moved. Throws if a peer means
  // another operation, or cannot deliver any more what `mine` needs.
  bool advance(const Operation& mine, GroupLock& lock, std::string_view phase);
  void check_agreement(const Operation& mine, GroupLock& lock, std::string_view phase);
  void check_peers(const Operation& mine, GroupLock& lock, std::string_view phase);
  [[noreturn]] void time_out(const Operation& mine, std::chrono::nanoseconds deadline,
                             GroupLock& lock, std::string_view phase);
  // Withdraws everything this rank has under way, then throws.
  [[noreturn]] void fail(ErrorCode code, int32_t peer, std::string_view phase, std::string what,
                         GroupLock& lock);
  void withdraw(GroupLock& lock);

  std::shared_ptr<LocalGroup> group_;
  int32_t rank_;
  std::chrono::nanoseconds timeout_;
  uint64_t next_sequence_ = 1;
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sends_;     // [ranks]
  std::vector<uint64_t> receives_;  // [ranks]
};

}  // namespace conclave::inline v0::comm
