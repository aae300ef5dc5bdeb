// One rank of a local group: a thread with its own buffers. Receivers copy out of the senders'
// buffers while both are inside wait; nothing else is shared.
#pragma once

#include "comm/local/local_group.h"
#include "comm/local/operation.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
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
  int32_t size() const noexcept override { return static_cast<int32_t>(group_->ranks.size()); }
  std::chrono::nanoseconds timeout() const noexcept override { return timeout_; }

  CommHandle begin_all_to_all_v(const AllToAllV& exchange) override;
  CommHandle begin_all_gather(std::span<const std::byte> send, std::span<std::byte> recv) override;
  CommHandle begin_all_reduce(std::span<const std::byte> send, std::span<std::byte> recv,
                              DType dtype, ReduceOp op) override;
  CommHandle begin_reduce_scatter(std::span<const std::byte> send, std::span<std::byte> recv,
                                  DType dtype, ReduceOp op) override;
  CommHandle begin_send(int32_t peer, std::span<const std::byte> data) override;
  CommHandle begin_recv(int32_t peer, std::span<std::byte> data) override;
  CommHandle begin_barrier() override;

  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override;
  void abort(std::string_view reason) noexcept override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  RankState& self() { return group_->ranks[static_cast<size_t>(rank_)]; }
  RankState& state_of(int32_t peer) { return group_->ranks[static_cast<size_t>(peer)]; }

  void check_peer(int32_t peer) const;
  void check_reduction(std::span<const std::byte> send, std::span<std::byte> recv,
                       DType dtype) const;
  bool usable();
  // Throws if this rank or the group has failed already.
  void check_usable(std::string_view phase);
  // Takes a free entry of this rank, which peers cannot see yet.
  Operation& post(OperationKind kind, int32_t peer);
  // Numbers the operation, so that peers find it. On an unusable communicator it stays hidden and
  // its wait throws.
  CommHandle publish(Operation& operation);

  // The peer's operation that `mine` waits for, or null while there is none.
  Operation* partner_of(const Operation& mine, int32_t peer);
  // Moves each of this rank's operations as far as its peers allow. True if anything moved.
  bool progress_all(Lock& lock, std::string_view phase);
  bool progress(Operation& mine, Lock& lock, std::string_view phase);
  bool take_from(Operation& mine, int32_t peer, Lock& lock, std::string_view phase);
  bool reduce_all(Operation& mine, Lock& lock, std::string_view phase);
  void acknowledge(Operation& mine, Operation& theirs, int32_t peer);

  bool needs(const Operation& mine, int32_t peer) const;
  bool complete(const Operation& mine) const;
  // Throws if a peer that `mine` still needs cannot deliver any more.
  void check_peers(const Operation& mine, Lock& lock, std::string_view phase);
  [[noreturn]] void time_out(const Operation& mine, std::chrono::nanoseconds deadline, Lock& lock,
                             std::string_view phase);
  // Withdraws everything this rank has under way, then throws.
  [[noreturn]] void fail(ErrorCode code, int32_t peer, std::string_view phase, std::string what,
                         Lock& lock);
  void withdraw(Lock& lock);

  std::shared_ptr<LocalGroup> group_;
  int32_t rank_;
  std::chrono::nanoseconds timeout_;
  uint64_t next_sequence_ = 1;
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sends_;     // [ranks]
  std::vector<uint64_t> receives_;  // [ranks]
};

}  // namespace conclave::inline v0::comm
