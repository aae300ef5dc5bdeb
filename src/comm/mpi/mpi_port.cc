#include "comm/mpi/mpi_port.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

static_assert(std::is_trivially_copyable_v<Notice> && std::is_trivially_copyable_v<ChunkHeader>);
constexpr size_t kNoticeHead = offsetof(Notice, payload);
constexpr int kControlTag = 1;
constexpr int kDataTag = 2;
// Survivors of a failure go on with tags of their own, so that late messages find nobody. Every MPI
// has tags up to 32767.
constexpr int kTagsOfAnEpoch = 2;
constexpr uint64_t kMaxEpoch = 16000;
// A process that ends waits no longer for word of its peers, whatever their deadlines.
constexpr std::chrono::nanoseconds kMaxPatience = std::chrono::minutes(1);
using Clock = std::chrono::steady_clock;

bool done(MPI_Request& request, int32_t peer) {
  if (request == MPI_REQUEST_NULL) return true;
  int flag = 0;
  check_mpi(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test", peer);
  return flag != 0;
}

// A request that ends in an error is over as well.
bool is_over(MPI_Request& request) noexcept {
  if (request == MPI_REQUEST_NULL) return true;
  int flag = 0;
  return MPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
}

// Ends the port of a communicator that its rank has destroyed.
class PortRemains final : public MpiRuntime::Remains {
 public:
  PortRemains(MpiRuntime& runtime, std::unique_ptr<MpiPort> port, const Leaving& leaving)
      : runtime_(runtime),
        port_(std::move(port)),
        leaving_(leaving),
        until_(Clock::now() + std::min<Clock::duration>(leaving.patience, kMaxPatience)) {}

  // After a failure nobody knows what is still on the way: the communicator's number stays in use,
  // and the port until MPI is done with its buffers, or all the rest of MPI ends.
  bool end(MpiRuntime::Sweep when) override {
    try {
      const bool last = when == MpiRuntime::Sweep::kLast;
      const bool is_abandoned = leaving_.has_gone_on || (!leaving_.orderly && !runtime_.closes());
      if (is_abandoned && !last) return port_->release();
      return (all_have_left() && leaving_.orderly) || last ? port_->close() : false;
    } catch (const PortFailure&) {
      return false;
    }
  }

  bool awaits_peers() override {
    try {
      return !leaving_.has_gone_on && Clock::now() < until_ && !all_have_left();
    } catch (const PortFailure&) {
      return false;
    }
  }

 private:
  // Reads until each peer has left, as far as that has come.
  bool all_have_left() {
    while (leaving_.staying > 1) {
      const auto received = port_->take_notice();
      if (!received) return false;
      const Notice& notice = *received->notice;
      if (notice.kind == NoticeKind::kGone) --leaving_.staying;
      // Survivors are being looked for, and this rank is not there.
      if (notice.kind == NoticeKind::kPresent) runtime_.leave_open();
      if (notice.kind != NoticeKind::kFailed) continue;
      leaving_.orderly = false;
      const ErrorCode code = notice.farewell.code;
      if (code == ErrorCode::kCommTimeout || code == ErrorCode::kCommPeerLost) {
        runtime_.leave_open();
      }
    }
    return true;
  }

  MpiRuntime& runtime_;
  std::unique_ptr<MpiPort> port_;
  Leaving leaving_;
  Clock::time_point until_;
};

PortGroup whole_group(MPI_Comm communicator) {
  int ranks = 0;
  check_mpi(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");
  PortGroup group{.communicator = std::make_shared<MPI_Comm>(communicator)};
  group.members.resize(static_cast<size_t>(ranks));
  std::iota(group.members.begin(), group.members.end(), 0);
  return group;
}

}  // namespace

MpiPort::MpiPort(MpiRuntime& runtime, MPI_Comm communicator)
    : MpiPort(runtime, whole_group(communicator)) {}

MpiPort::MpiPort(MpiRuntime& runtime, PortGroup group)
    : runtime_(runtime), group_(std::move(group)) {
  int member = 0;
  check_mpi(MPI_Comm_rank(*group_.communicator, &member), "MPI_Comm_rank");
  rank_ = number_of(member);
  state_.out.resize(group_.members.size());
  state_.in.resize(group_.members.size());
}

int32_t MpiPort::number_of(int member) const {
  const auto place = std::ranges::lower_bound(group_.members, member);
  if (place == group_.members.end() || *place != member) {
    throw PortFailure(fmt::format("rank {} of MPI is none of this group", member), -1);
  }
  return static_cast<int32_t>(place - group_.members.begin());
}

int MpiPort::tag(int of_first_epoch) const {
  return of_first_epoch + static_cast<int>(group_.epoch) * kTagsOfAnEpoch;
}

Support MpiPort::supports_survivors() const {
  if (group_.epoch < kMaxEpoch) return Support::yes();
  return Support::no(fmt::format("its ranks have gone on after {} failures", kMaxEpoch));
}

std::unique_ptr<MessagePort> MpiPort::survivors(const std::vector<int32_t>& ranks) {
  PortGroup group{.communicator = group_.communicator, .epoch = group_.epoch + 1};
  for (const int32_t rank : ranks) group.members.push_back(member(rank));
  if (ranks.size() < group_.members.size()) runtime_.leave_open();
  return std::make_unique<MpiPort>(runtime_, std::move(group));
}

void MpiPort::check_caller() const {
  if (is_inherited()) {
    throw Error(ErrorCode::kForked, {.what = "MPI does not survive a fork",
                                     .hint = "start the ranks before MPI is initialised"});
  }
  if (runtime_.may_call()) return;
  throw Error(ErrorCode::kState,
              {.what = "this thread may not call MPI",
               .expected = "the main thread, or MPI_THREAD_SERIALIZED at least",
               .hint = "initialise MPI by MPI_Init_thread, or let the library initialise it"});
}

void MpiPort::post(int32_t peer, const Notice& notice, size_t payload_bytes) {
  auto free = std::find_if(state_.control.begin(), state_.control.end(),
                           [&](Control& slot) { return done(slot.request, peer); });
  if (free == state_.control.end()) {
    state_.control.emplace_back();
    free = std::prev(state_.control.end());
  }
  const size_t bytes = kNoticeHead + payload_bytes;
  std::memcpy(static_cast<void*>(&free->notice), &notice, bytes);
  check_mpi(MPI_Isend(&free->notice, static_cast<int>(bytes), MPI_BYTE, member(peer),
                      tag(kControlTag), *group_.communicator, &free->request),
            "MPI_Isend", peer);
}

std::optional<ReceivedNotice> MpiPort::take_notice() {
  Control& arriving = state_.arriving;
  if (arriving.request == MPI_REQUEST_NULL) {
    check_mpi(MPI_Irecv(&arriving.notice, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE,
                        tag(kControlTag), *group_.communicator, &arriving.request),
              "MPI_Irecv");
  }
  int flag = 0;
  MPI_Status status;
  check_mpi(MPI_Test(&arriving.request, &flag, &status), "MPI_Test");
  if (flag == 0) return std::nullopt;
  return ReceivedNotice{.peer = number_of(status.MPI_SOURCE), .notice = &arriving.notice};
}

MpiPort::Chunk& MpiPort::buffer(Stream& stream, uint64_t message) {
  std::unique_ptr<Chunk>& chunk = stream.buffers[message % 2];
  if (!chunk) chunk = std::make_unique_for_overwrite<Chunk>();
  return *chunk;
}

bool MpiPort::send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data) {
  Stream& stream = state_.out[at(peer)];
  MPI_Request& request = stream.requests[stream.begun % 2];
  if (!done(request, peer)) return false;
  Chunk& chunk = buffer(stream, stream.begun);
  chunk.header = header;
  std::memcpy(chunk.data.data(), data, static_cast<size_t>(header.bytes));
  const auto bytes = static_cast<int>(offsetof(Chunk, data) + static_cast<size_t>(header.bytes));
  check_mpi(MPI_Isend(&chunk, bytes, MPI_BYTE, member(peer), tag(kDataTag), *group_.communicator,
                      &request),
            "MPI_Isend", peer);
  ++stream.begun;
  return true;
}

// Only as many as were announced: none is left over when all operations are complete.
void MpiPort::post_receives(int32_t peer) {
  Stream& stream = state_.in[at(peer)];
  while (stream.begun < stream.expected && stream.begun - stream.ended < 2) {
    Chunk& chunk = buffer(stream, stream.begun);
    check_mpi(MPI_Irecv(&chunk, sizeof(Chunk), MPI_BYTE, member(peer), tag(kDataTag),
                        *group_.communicator, &stream.requests[stream.begun % 2]),
              "MPI_Irecv", peer);
    ++stream.begun;
  }
}

std::optional<ReceivedChunk> MpiPort::take_chunk(int32_t peer) {
  Stream& stream = state_.in[at(peer)];
  post_receives(peer);
  if (stream.begun == stream.ended) return std::nullopt;
  if (!done(stream.requests[stream.ended % 2], peer)) return std::nullopt;
  Chunk& chunk = buffer(stream, stream.ended);
  ++stream.ended;
  return ReceivedChunk{.header = chunk.header, .data = chunk.data.data()};
}

bool MpiPort::all_sent() noexcept {
  bool over = true;
  for (Control& slot : state_.control) over = is_over(slot.request) && over;
  for (Stream& stream : state_.out) {
    for (MPI_Request& request : stream.requests) over = is_over(request) && over;
  }
  return over;
}

void MpiPort::flush(std::chrono::nanoseconds deadline) noexcept {
  const auto until = std::chrono::steady_clock::now() + deadline;
  while (!all_sent() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

bool MpiPort::all_cancelled() noexcept {
  bool over = true;
  const auto cancel = [&](MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return;
    MPI_Cancel(&request);
    over = is_over(request) && over;
  };
  cancel(state_.arriving.request);
  for (Stream& stream : state_.in) {
    for (MPI_Request& request : stream.requests) cancel(request);
  }
  return over;
}

bool MpiPort::close() noexcept {
  const bool sent = all_sent();
  if (!all_cancelled() || !sent) return false;
  // After a failure a rank that was left out may still send to this number.
  if (group_.epoch == 0 && group_.communicator.use_count() == 1) {
    MPI_Comm_free(group_.communicator.get());
  }
  group_.communicator.reset();
  return true;
}

void MpiPort::give_back(Stream& stream) noexcept {
  for (size_t i = 0; i < stream.buffers.size(); ++i) {
    if (stream.requests[i] == MPI_REQUEST_NULL) stream.buffers[i].reset();
  }
}

bool MpiPort::release() noexcept {
  const bool sent = all_sent();
  const bool cancelled = all_cancelled();
  for (Stream& stream : state_.out) give_back(stream);
  for (Stream& stream : state_.in) give_back(stream);
  return sent && cancelled;
}

void MpiPort::retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept {
  // A child may not even free what MPI of its parent holds.
  if (is_inherited()) return static_cast<void>(self.release());
  const std::lock_guard lock(runtime_.mutex());
  if (leaving.rank_is_missing) runtime_.leave_open();
  std::unique_ptr<MpiPort> port(static_cast<MpiPort*>(self.release()));
  runtime_.retire(std::make_unique<PortRemains>(runtime_, std::move(port), leaving));
}

}  // namespace conclave::inline v0::comm
