// A rank that sends messages to its peers, over any transport. Ranks tell each other which
// operation they begin and with how many bytes; what agrees moves in chunks, whenever this rank
// calls in, and for operations in the background from a thread of its own.
#pragma once

#include "comm/message/background.h"
#include "comm/message/message_operation.h"
#include "comm/message/message_port.h"
#include "comm/message/shared_verdict.h"
#include "comm/message/verdict.h"
#include "comm/message/wire.h"

#include "conclave/comm.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

using MessageLock = std::unique_lock<std::mutex>;

// A rank of a group that goes on after a failure, and what it knows of its peers.
struct MessageSurvivor {
  std::unique_ptr<MessagePort> port;
  std::vector<Identity> identities = {};  // [ranks]
  std::vector<int32_t> members = {};      // [ranks] numbers in the first group
  std::shared_ptr<VerdictPlace> place;
};

class MessageCommunicator final : public Communicator {
 public:
  // Comes before meet(). Without a place for verdicts ranks look for one when they meet.
  MessageCommunicator(std::unique_ptr<MessagePort> port, std::chrono::nanoseconds timeout,
                      std::shared_ptr<VerdictPlace> place = nullptr);
  // Needs no meeting: its peers are known.
  MessageCommunicator(MessageSurvivor survivor, std::chrono::nanoseconds timeout);
  MessageCommunicator(const MessageCommunicator&) = delete;
  MessageCommunicator& operator=(const MessageCommunicator&) = delete;
  ~MessageCommunicator() override;

  // Collective: every rank is there, and of this version. Throws CommError.
  void meet();
  // For ranks that have met and found no place for verdicts: this one, on each of them; null and
  // the reason where there is none.
  void settle_at(std::shared_ptr<VerdictPlace> place, std::string reason);

  std::string_view name() const noexcept override { return port_->name(); }
  int32_t rank() const noexcept override { return port_->rank(); }
  int32_t size() const noexcept override { return port_->size(); }
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
  using Clock = std::chrono::steady_clock;
  enum class Standing : uint8_t { kActive, kFailed, kGone };

  struct Arrival {
    bool waiting = false;  // this rank has not begun its part
    Notice notice;
  };
  struct Peer {
    Standing standing = Standing::kActive;
    bool met = false;
    bool ready = false;
    bool present = false;  // in the roll call for survivors
    bool left = false;     // its communicator is destroyed
    bool ended = false;    // its process is known to have ended
    Identity identity;
    Farewell farewell;
    std::vector<Arrival> arrivals;
    Clock::time_point seen_dead{};  // zero: not seen
    uint64_t sends = 0;             // messages begun to this peer, and from it
    uint64_t receives = 0;
  };

  bool is_rank(int32_t number) const { return number >= 0 && number < size(); }
  Peer& peer(int32_t number) { return peers_[static_cast<size_t>(number)]; }
  void greet(NoticeKind kind);
  void await_all(MessageLock& lock, Clock::time_point until, bool Peer::*heard);
  void end_operations();
  bool has_finished(const Peer& other, const MessageOperation& mine) const;
  bool usable() const { return aborted_by_ < 0 && standing_ == Standing::kActive; }
  void check_usable(std::string_view phase);
  // The thread in the background, in overlap.cc. It keeps away while this rank waits.
  void wake_background() noexcept;
  bool has_background_work() const;
  bool advance_in_background();
  // Says whether bytes go apart from the announcement, so that a peer is to be served again.
  bool is_long(const MessageOperation& operation) const;
  MessageOperation& take_entry();
  void announce(const MessageOperation& operation);
  MessageOperation& operation_of(CommHandle handle, std::string_view phase);

  void send_pending_abort() noexcept;
  // Reads what has come and sends what may go, for all operations under way. Throws where ranks
  // disagree, or the transport fails.
  void advance(std::string_view phase);
  void read_notices();
  void hear_of_abort() noexcept;
  void read(int32_t from, const Notice& notice);
  void read_chunks(int32_t from);
  void move(MessageOperation& operation, std::string_view phase);
  void match(MessageOperation& operation, int32_t with, std::string_view phase);
  void send_lanes(MessageOperation& operation, int32_t to);

  // Complete, and this rank need not call again for its peers to get their bytes.
  bool is_over(const MessageOperation& operation) const;
  Leaving leaving() const;
  // Throws if a peer cannot bring any more what `mine` needs.
  void check_peers(const MessageOperation& mine, std::string_view phase);
  void watch_processes(const MessageOperation& mine, std::string_view phase);
  bool has_vanished(int32_t number);
  [[noreturn]] void time_out(const MessageOperation& mine, std::chrono::nanoseconds deadline,
                             std::string_view phase);
  // Ends everything that this rank has under way, tells its peers, then throws.
  [[noreturn]] void fail(ErrorCode code, int32_t culprit, std::string_view phase, std::string what);
  // The roll call, in shrink.cc.
  void share_file(std::shared_ptr<SharedFile> file);
  void check_file_is_shared();
  void prepare_verdict();
  Support shrink_support() const;
  void call_for_survivors();
  void look_for_ended_processes();
  RollCall roll_call();
  Present settle(MessageLock& lock, Clock::time_point until, std::string_view phase);
  MessageSurvivor survivor_of(const std::vector<int32_t>& ranks);

  // Cannot be sent to a peer: it then learns by its deadline.
  void say_farewell(NoticeKind kind, ErrorCode code, int32_t culprit,
                    std::string_view reason) noexcept;

  std::unique_ptr<MessagePort> port_;
  std::chrono::nanoseconds timeout_;
  Identity self_;
  std::vector<Peer> peers_;
  std::vector<MessageOperation> operations_;
  uint64_t next_sequence_ = 1;
  uint64_t collectives_ = 0;
  Notice outgoing_;
  Clock::time_point last_look_ = Clock::now();  // at the processes of peers

  uint64_t finished_ = 0;  // collectives that were complete when this rank gave up
  Standing standing_ = Standing::kActive;
  ErrorCode failure_ = ErrorCode::kCommAborted;
  int32_t culprit_ = -1;
  std::string failure_text_;
  bool is_unreported_ = false;  // the failure, which the thread in the background has met
  bool is_waiting_ = false;
  int32_t aborted_by_ = -1;
  bool abort_to_send_ = false;  // by a thread that may not use the port
  std::array<char, 256> abort_reason_{};

  std::vector<int32_t> members_;  // [ranks] numbers in the first group
  std::shared_ptr<VerdictPlace> place_;
  std::unique_ptr<Verdict> verdict_;  // the next roll call's
  std::string no_verdict_;            // why there is none
  bool has_gone_on_ = false;
  bool some_are_missing_ = false;  // among those that were to go on

  std::unique_ptr<Background> background_;
};

}  // namespace conclave::inline v0::comm
