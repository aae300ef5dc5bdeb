// Watches what a rank has on its device, and its peers: a thread that turns lateness, loss and
// disagreement into the one CommError of the communicator, the same on every rank.
#pragma once

#include "comm/nccl/before_exit.h"
#include "comm/nccl/device_steps.h"
#include "comm/nccl/nccl_group.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace conclave::inline v0::comm {

// An operation that only the device waits for.
struct WatchedOperation {
  int32_t cell = 0;
  uint32_t number = 0;  // among the cell's operations: over once the mark of ends has it
  int32_t peer = -1;    // for a message
  std::chrono::nanoseconds deadline{};
  std::array<char, 64> phase{};
};

// A CommError says this beside its rank and phase.
std::string text_of(const CommError& error);

inline bool has_passed(uint32_t mark, uint32_t number) {
  return static_cast<int32_t>(mark - number) >= 0;
}

class NcclWatch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Parts {
    std::unique_ptr<Communicator> peers;  // connects the same ranks, for this thread alone
    NcclGroup& group;
    const Marks& marks;
    std::function<void(const std::string& why)> end_host;  // ends what the host waits for
    // Finds what this rank and a peer mean in the collective that all are in, if that differs.
    std::function<std::optional<ClaimPair>()> find_disagreement;
    // Ends what kernels of this library wait for; returns at once.
    std::function<void()> stop_waits = [] {};
  };
  explicit NcclWatch(Parts parts);
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;
  // Leaves once no peer's work touches this rank's memory, or after some seconds. Where the process
  // exits before, its end does.
  ~NcclWatch();
  // The same, after a failure too, which the others then know of. Afterwards nothing is watched,
  // and what has failed stays so.
  void stop();

  // From any thread. What is over drops out by itself.
  void follow(const WatchedOperation& operation);
  // For those of graphs, which run whenever the application says.
  void follow_graphs(std::chrono::nanoseconds deadline, std::string_view phase);
  // The host has waited for `deadline`: finds out who is late. Returns at once; `failed` follows.
  void find_culprit(int32_t peer, std::chrono::nanoseconds deadline);
  // The first failure counts. Ends all work of this rank on the device, and tells the others.
  void fail(ErrorCode code, int32_t culprit, std::string what) noexcept;
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  // After a failure: whether an operation was over before it.
  bool had_ended(int32_t cell, uint32_t number) const noexcept {
    return has_passed(ended_before_[static_cast<size_t>(cell)], number);
  }
  // A rank that has left, or -1; a message needs only its peer.
  int32_t rank_that_left(int32_t peer = -1) const noexcept;
  // Throws the CommError of the failure, if there is one.
  void check(std::string_view phase) const;

 private:
  enum class NoteKind : uint32_t { kRoll, kLeaving, kSeen, kFailed };
  struct Note {
    NoteKind kind = NoteKind::kRoll;
    ErrorCode code = ErrorCode::kCommAborted;
    int32_t culprit = -1;
    uint32_t collectives = 0;  // that the rank has begun
    std::array<char, 200> text{};
  };
  struct Peer {
    CommHandle receive;
    Note note;
    std::atomic<bool> left{false};
    bool seen = false;  // has seen this rank leave
    bool owed = false;  // is to be told that this rank has seen it leave
    uint32_t collectives = 0;
    Clock::time_point left_at{};
  };
  struct Turn {
    WatchedOperation operation;
    Clock::time_point since{};  // zero: its turn has not come
  };
  // Each rank says this when the roll is called.
  struct Presence {
    uint32_t collectives = 0;
    int32_t culprit = -1;
    int64_t waited_ms = 0;
    int32_t nccl_error = 0;  // what NCCL has reported, or 0
    int32_t disagrees = 0;   // 1: the claims are set
    ClaimPair claims = {};
  };

  // Peers of work that is under way learn that this rank is gone.
  void end_with_process();
  void watch();
  void turn();
  void listen();
  void hear(int32_t from, const Note& note);
  void listen_to(int32_t from);
  void tell(int32_t to, const Note& note);
  void tell_all(const Note& note);
  void look_at_device();
  void look_at_turns();
  void look_at_graphs();
  void look_at_leavers();
  // Lets ranks that leave go, once this one has nothing on its device.
  void answer_leavers(bool has_work);
  void call_roll(Presence mine);
  void answer_roll(Presence mine);
  void judge(const std::vector<Presence>& all);
  // `claimant` is the rank whose claims these are.
  void fail_by(const ClaimPair& claims, int32_t claimant);
  int32_t culprit_for(ErrorCode code, int32_t culprit, int32_t claimant) const;
  bool is_idle() const;
  void leave();
  void fail_by(const CommError& error) noexcept;
  template <class Body>
  void for_each_present(const Body& body);

  Parts parts_;
  std::vector<Peer> peers_;
  bool has_told_ = false;  // the others know of the failure

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::vector<Turn> turns_;
  std::chrono::nanoseconds graph_deadline_{};  // zero: no graph has operations
  Clock::time_point graph_since_ = Clock::now();
  std::array<uint32_t, 2> graph_marks_{};
  bool roll_wanted_ = false;
  Presence roll_;
  bool leaving_ = false;

  mutable std::mutex failure_mutex_;
  std::atomic<bool> failed_{false};
  ErrorCode code_ = ErrorCode::kCommAborted;
  int32_t culprit_ = -1;
  std::string what_;
  std::array<uint32_t, kMarkCells> ended_before_{};

  std::thread thread_;  // it uses all before
  // Set where there are peers: without any the thread asks NCCL nothing.
  std::optional<BeforeExit> before_exit_;
};

}  // namespace conclave::inline v0::comm
