#include "comm/nccl/nccl_watch.h"

#include "comm/agreement.h"
#include "comm/nccl/device_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cuda_runtime_api.h>
#include <span>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

// Between looks at the device and at the peers.
constexpr auto kPeriod = 10ms;
// For the threads of peers, which look as often.
constexpr std::chrono::nanoseconds kAnswerTime = 500ms;
constexpr std::chrono::nanoseconds kTellTime = 300ms;
// For peers to see that this rank leaves.
constexpr auto kLeaveTime = 5s;
// For the last bytes of a rank that has left.
constexpr auto kLastBytes = 100ms;

constexpr std::string_view kPhase = "watch";

// The device writes these at any time.
uint32_t read(const uint32_t& mark) {
  const uint32_t value = *static_cast<const volatile uint32_t*>(&mark);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}

template <size_t kSize>
void copy_text(std::string_view text, std::array<char, kSize>& to) {
  const size_t length = std::min(text.size(), kSize - 1);
  std::copy_n(text.begin(), length, to.begin());
  to[length] = '\0';
}

int64_t in_ms(std::chrono::nanoseconds time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <class T>
std::span<std::byte> writable_bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

std::string text_of(const CommError& error) {
  const std::string text = error.what();
  const std::string before = "phase " + error.phase() + ": ";
  const size_t at = text.find(before);
  return at == std::string::npos ? text : text.substr(at + before.size());
}

NcclWatch::NcclWatch(Parts parts)
    : parts_(std::move(parts)), peers_(static_cast<size_t>(parts_.peers->size())) {
  turns_.reserve(kMarkCells);
  try {
    for_each_present([&](int32_t peer) { listen_to(peer); });
  } catch (const CommError& error) {
    fail_by(error);  // a peer is lost already: every call says so
  }
  thread_ = std::thread([this] { watch(); });
  if (peers_.size() > 1) before_exit_.emplace([this] { end_with_process(); });
}

NcclWatch::~NcclWatch() {
  before_exit_.reset();
  stop();
}

void NcclWatch::end_with_process() {
  const int32_t rank = parts_.peers->rank();
  if (!is_idle()) {
    fail(ErrorCode::kCommPeerLost, rank, fmt::format("rank {} exited during an operation", rank));
  }
  stop();
}

void NcclWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

template <class Body>
void NcclWatch::for_each_present(const Body& body) {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const auto number = static_cast<int32_t>(peer);
    if (number != parts_.peers->rank() && !peers_[peer].left) body(number);
  }
}

void NcclWatch::follow(const WatchedOperation& operation) {
  const std::lock_guard lock(mutex_);
  if (turns_.size() < turns_.capacity()) turns_.push_back({.operation = operation});
}

void NcclWatch::follow_graphs(std::chrono::nanoseconds deadline, std::string_view) {
  const std::lock_guard lock(mutex_);
  graph_deadline_ = deadline;
  graph_since_ = Clock::now();
}

void NcclWatch::find_culprit(int32_t peer, std::chrono::nanoseconds deadline) {
  const std::lock_guard lock(mutex_);
  if (roll_wanted_) return;
  roll_wanted_ = true;
  roll_ = {.culprit = peer, .waited_ms = in_ms(deadline)};
  wake_.notify_all();
}

void NcclWatch::fail(ErrorCode code, int32_t culprit, std::string what) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failed_) return;
    code_ = code;
    culprit_ = culprit;
    what_ = std::move(what);
    for (size_t cell = 0; cell < ended_before_.size(); ++cell) {
      ended_before_[cell] = read(parts_.marks.ended[cell]);
    }
    failed_.store(true, std::memory_order_release);
  }
  parts_.stop_waits();
  parts_.group.end_work();
  parts_.end_host(what_);
  const std::lock_guard lock(mutex_);
  wake_.notify_all();
}

void NcclWatch::fail_by(const CommError& error) noexcept {
  has_told_ = true;  // the communicator of this thread tells of its own failures
  fail(error.code(), error.peer(), text_of(error));
}

int32_t NcclWatch::rank_that_left(int32_t peer) const noexcept {
  if (peer >= 0) return peers_[static_cast<size_t>(peer)].left ? peer : -1;
  for (size_t number = 0; number < peers_.size(); ++number) {
    if (peers_[number].left) return static_cast<int32_t>(number);
  }
  return -1;
}

void NcclWatch::check(std::string_view phase) const {
  if (!failed()) return;
  const std::lock_guard lock(failure_mutex_);
  throw CommError(code_, culprit_, std::string(phase), what_);
}

void NcclWatch::watch() {
  static_cast<void>(cudaSetDevice(parts_.group.ordinal()));
  // Another thread's capture must not break by what this one asks the driver.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kPeriod, [&] { return leaving_ || roll_wanted_; });
      if (leaving_) break;
    }
    turn();
  }
  leave();
}

void NcclWatch::turn() {
  try {
    if (!failed()) listen();
    if (!failed()) look_at_device();
    if (!failed()) return;
    answer_leavers(!parts_.group.await_end({}));
    if (has_told_) return;
    has_told_ = true;
    Note note{.kind = NoteKind::kFailed, .code = code_, .culprit = culprit_};
    copy_text(what_, note.text);
    tell_all(note);
  } catch (const CommError& error) {
    fail_by(error);
  } catch (const std::exception& error) {
    fail(ErrorCode::kCommPeerLost, -1, error.what());
  }
}

void NcclWatch::listen_to(int32_t from) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  peer.receive = parts_.peers->begin_recv(from, writable_bytes_of(peer.note));
}

void NcclWatch::listen() {
  for_each_present([&](int32_t from) {
    Peer& peer = peers_[static_cast<size_t>(from)];
    while (!failed() && !peer.left && parts_.peers->test(peer.receive, kPhase)) {
      parts_.peers->wait(peer.receive, kTellTime, kPhase);
      const Note note = peer.note;
      if (note.kind != NoteKind::kLeaving) listen_to(from);
      hear(from, note);
    }
  });
}

void NcclWatch::hear(int32_t from, const Note& note) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  switch (note.kind) {
    case NoteKind::kRoll:
      return answer_roll({.collectives = read(parts_.marks.collectives)});
    case NoteKind::kSeen:
      peer.seen = true;
      return;
    case NoteKind::kFailed:
      has_told_ = true;  // whoever failed first tells all
      return fail(note.code, culprit_for(note.code, note.culprit, from), note.text.data());
    case NoteKind::kLeaving:
      peer.collectives = note.collectives;
      peer.left_at = Clock::now();
      peer.owed = true;
      peer.seen = true;
      peer.left = true;
      return;
  }
}

void NcclWatch::tell(int32_t to, const Note& note) {
  const CommHandle sent = parts_.peers->begin_send(to, bytes_of(note));
  parts_.peers->wait(sent, kTellTime, kPhase);
}

void NcclWatch::tell_all(const Note& note) {
  for_each_present([&](int32_t to) { tell(to, note); });
}

bool NcclWatch::is_idle() const {
  const Marks& marks = parts_.marks;
  for (size_t cell = 0; cell < marks.begun.size(); ++cell) {
    if (read(marks.begun[cell]) != read(marks.ended[cell])) return false;
  }
  return true;
}

void NcclWatch::look_at_device() {
  if (read(parts_.marks.mismatches) != 0) {
    return fail_by(ClaimPair{parts_.marks.mine, parts_.marks.theirs}, parts_.peers->rank());
  }
  const NcclResult state = parts_.group.async_error();
  // NCCL may notice by the lengths of messages that ranks disagree, and says no more than that.
  if (state != kNcclSuccess && state != kNcclInProgress) return call_roll({.nccl_error = state});
  look_at_leavers();
  look_at_turns();
  look_at_graphs();
  Presence wanted;
  {
    const std::lock_guard lock(mutex_);
    if (failed() || !roll_wanted_) return;
    wanted = roll_;
  }
  call_roll(wanted);
}

void NcclWatch::look_at_leavers() {
  for (size_t number = 0; number < peers_.size(); ++number) {
    Peer& peer = peers_[number];
    if (!peer.left) continue;
    const auto rank = static_cast<int32_t>(number);
    if (static_cast<int32_t>(read(parts_.marks.collectives) - peer.collectives) > 0) {
      return fail(ErrorCode::kCommPeerLost, rank,
                  fmt::format("rank {} was destroyed before an operation of this rank", rank));
    }
  }
  answer_leavers(!is_idle());
}

void NcclWatch::answer_leavers(bool has_work) {
  for (size_t number = 0; number < peers_.size(); ++number) {
    if (has_work || !peers_[number].owed) continue;
    peers_[number].owed = false;
    tell(static_cast<int32_t>(number), {.kind = NoteKind::kSeen});
  }
}

void NcclWatch::look_at_turns() {
  const Clock::time_point now = Clock::now();
  Presence late;
  bool is_late = false;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(turns_, [&](const Turn& turn) {
      const WatchedOperation& it = turn.operation;
      return has_passed(read(parts_.marks.ended[static_cast<size_t>(it.cell)]), it.number);
    });
    for (Turn& turn : turns_) {
      const WatchedOperation& it = turn.operation;
      if (!has_passed(read(parts_.marks.begun[static_cast<size_t>(it.cell)]), it.number)) continue;
      if (turn.since == Clock::time_point{}) turn.since = now;
      const bool has_left = it.peer >= 0 && peers_[static_cast<size_t>(it.peer)].left;
      if (now - turn.since > (has_left ? kLastBytes : it.deadline)) {
        is_late = true;
        late = {.culprit = it.peer, .waited_ms = in_ms(it.deadline)};
        if (has_left) break;
      }
    }
  }
  if (!is_late) return;
  if (late.culprit >= 0 && peers_[static_cast<size_t>(late.culprit)].left) {
    return fail(ErrorCode::kCommPeerLost, late.culprit,
                fmt::format("rank {} was destroyed during a message", late.culprit));
  }
  call_roll(late);
}

// Each replay counts both marks up, so that marks that stand still apart are one that waits.
void NcclWatch::look_at_graphs() {
  const std::array<uint32_t, 2> marks = {read(parts_.marks.begun[kGraphCell]),
                                         read(parts_.marks.ended[kGraphCell])};
  const Clock::time_point now = Clock::now();
  Presence late;
  {
    const std::lock_guard lock(mutex_);
    if (graph_deadline_.count() == 0) return;
    if (marks != graph_marks_ || marks[0] == marks[1]) {
      graph_marks_ = marks;
      graph_since_ = now;
      return;
    }
    if (now - graph_since_ <= graph_deadline_) return;
    late.waited_ms = in_ms(graph_deadline_);
  }
  call_roll(late);
}

// Everyone's thread answers, also where its application does not call: so that the rank that has
// come to the fewest operations is known, and whoever does not answer is not there.
void NcclWatch::call_roll(Presence mine) {
  if (failed()) return;
  mine.collectives = read(parts_.marks.collectives);
  tell_all({.kind = NoteKind::kRoll});
  answer_roll(mine);
}

void NcclWatch::answer_roll(Presence mine) {
  if (failed()) return;
  if (const auto claims = parts_.find_disagreement()) {
    mine.disagrees = 1;
    mine.claims = *claims;
  }
  std::vector<Presence> all(peers_.size());
  const CommHandle handle =
      parts_.peers->begin_all_gather(bytes_of(mine), std::as_writable_bytes(std::span(all)));
  parts_.peers->wait(handle, kAnswerTime, kPhase);
  has_told_ = true;
  judge(all);
}

// All ranks judge alike: by what the others said, and of claims each by its own where it has some.
void NcclWatch::judge(const std::vector<Presence>& all) {
  int32_t culprit = -1;
  int64_t waited_ms = 0;
  NcclResult nccl_error = kNcclSuccess;
  size_t behind = 0;
  bool differ = false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    waited_ms = std::max(waited_ms, all[rank].waited_ms);
    nccl_error = std::max(nccl_error, all[rank].nccl_error);
    if (culprit < 0) culprit = all[rank].culprit;
    const auto step = static_cast<int32_t>(all[rank].collectives - all[behind].collectives);
    differ |= step != 0;
    if (step < 0) behind = rank;
  }
  if (culprit < 0 && differ) culprit = static_cast<int32_t>(behind);
  if (culprit >= 0 && nccl_error == kNcclSuccess) {
    return fail(
        ErrorCode::kCommTimeout, culprit,
        fmt::format("rank {} did not come to an operation within {} ms", culprit, waited_ms));
  }
  // Where some have not come to the operation, their claims are those of the one before.
  const Presence& own = all[static_cast<size_t>(parts_.peers->rank())];
  if (!differ && own.disagrees != 0) return fail_by(own.claims, parts_.peers->rank());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (differ || all[rank].disagrees == 0) continue;
    return fail_by(all[rank].claims, static_cast<int32_t>(rank));
  }
  if (nccl_error != kNcclSuccess) {
    return fail(ErrorCode::kCommPeerLost, culprit,
                fmt::format("NCCL reports: {}", parts_.group.error_text(nccl_error)));
  }
  fail(ErrorCode::kCommTimeout, -1,
       fmt::format("all ranks came, and the device did not finish within {} ms", waited_ms));
}

// Each of two ranks that disagree names the other, also where only one of them has noticed.
int32_t NcclWatch::culprit_for(ErrorCode code, int32_t culprit, int32_t claimant) const {
  const bool names_itself =
      code == ErrorCode::kCommMismatch && culprit == parts_.peers->rank() && claimant >= 0;
  return names_itself ? claimant : culprit;
}

void NcclWatch::fail_by(const ClaimPair& claims, int32_t claimant) {
  fail(ErrorCode::kCommMismatch,
       culprit_for(ErrorCode::kCommMismatch, claims.theirs.peer, claimant),
       text_of(claims, claimant));
}

void NcclWatch::leave() {
  try {
    turn();
    if (failed()) return;
    tell_all({.kind = NoteKind::kLeaving, .collectives = read(parts_.marks.collectives)});
    const Clock::time_point until = Clock::now() + kLeaveTime;
    while (!failed() && Clock::now() < until) {
      listen();
      bool all_seen = true;
      for_each_present(
          [&](int32_t peer) { all_seen = all_seen && peers_[static_cast<size_t>(peer)].seen; });
      if (all_seen) return;
      std::this_thread::sleep_for(1ms);
    }
  } catch (const std::exception&) {
    return;  // a peer is lost: nothing of it touches this rank's memory
  }
}

}  // namespace conclave::inline v0::comm
