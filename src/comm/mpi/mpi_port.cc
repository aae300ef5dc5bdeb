#include "comm/mpi/mpi_port.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

static_assert(std::is_trivially_copyable_v<Notice> && std::is_trivially_copyable_v<ChunkHeader>);
constexpr size_t kNoticeHead = offsetof(Notice, payload);
constexpr int kControlTag = 1;
constexpr int kDataTag = 2;

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
struct Remains {
  std::shared_ptr<MpiPort> port;
  MpiRuntime& runtime;
  bool orderly;
  int32_t staying;  // peers that have not left; the rank itself is one of them

  // Reads until each peer has left, as far as that has come.
  bool all_have_left() {
    while (staying > 1) {
      const auto received = port->take_notice();
      if (!received) return false;
      const Notice& notice = *received->notice;
      if (notice.kind == NoticeKind::kGone) --staying;
      if (notice.kind != NoticeKind::kFailed) continue;
      orderly = false;
      const ErrorCode code = notice.farewell.code;
      if (code == ErrorCode::kCommTimeout || code == ErrorCode::kCommPeerLost) runtime.leave_open();
    }
    return true;
  }
  // After a failure the port stays until the end: nobody knows what is still on the way.
  bool end(MpiRuntime::Sweep when) {
    try {
      const bool last = when == MpiRuntime::Sweep::kLast;
      return (all_have_left() && orderly) || last ? port->close() : false;
    } catch (const PortFailure&) {
      return false;
    }
  }
};

}  // namespace

MpiPort::MpiPort(MpiRuntime& runtime, MPI_Comm communicator)
    : runtime_(runtime), communicator_(communicator) {
  check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
  state_.out.resize(at(size_));
  state_.in.resize(at(size_));
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
  check_mpi(MPI_Isend(&free->notice, static_cast<int>(bytes), MPI_BYTE, peer, kControlTag,
                      communicator_, &free->request),
            "MPI_Isend", peer);
}

std::optional<ReceivedNotice> MpiPort::take_notice() {
  Control& arriving = state_.arriving;
  if (arriving.request == MPI_REQUEST_NULL) {
    check_mpi(MPI_Irecv(&arriving.notice, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, kControlTag,
                        communicator_, &arriving.request),
              "MPI_Irecv");
  }
  int flag = 0;
  MPI_Status status;
  check_mpi(MPI_Test(&arriving.request, &flag, &status), "MPI_Test");
  if (flag == 0) return std::nullopt;
  return ReceivedNotice{.peer = status.MPI_SOURCE, .notice = &arriving.notice};
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
  check_mpi(MPI_Isend(&chunk, bytes, MPI_BYTE, peer, kDataTag, communicator_, &request),
            "MPI_Isend", peer);
  ++stream.begun;
  return true;
}

// Only as many as were announced: none is left over when all operations are complete.
void MpiPort::post_receives(int32_t peer) {
  Stream& stream = state_.in[at(peer)];
  while (stream.begun < stream.expected && stream.begun - stream.ended < 2) {
    Chunk& chunk = buffer(stream, stream.begun);
    check_mpi(MPI_Irecv(&chunk, sizeof(Chunk), MPI_BYTE, peer, kDataTag, communicator_,
                        &stream.requests[stream.begun % 2]),
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

bool MpiPort::close() noexcept {
  bool over = all_sent();
  const auto cancel = [&](MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return;
    MPI_Cancel(&request);
    over = is_over(request) && over;
  };
  cancel(state_.arriving.request);
  for (Stream& stream : state_.in) {
    for (MPI_Request& request : stream.requests) cancel(request);
  }
  if (over) MPI_Comm_free(&communicator_);
  return over;
}

void MpiPort::retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept {
  // A child may not even free what MPI of its parent holds.
  if (is_inherited()) return static_cast<void>(self.release());
  const std::lock_guard lock(runtime_.mutex());
  if (leaving.rank_is_missing) runtime_.leave_open();
  Remains remains{.port = std::shared_ptr<MpiPort>(static_cast<MpiPort*>(self.release())),
                  .runtime = runtime_,
                  .orderly = leaving.orderly,
                  .staying = leaving.staying};
  runtime_.retire([remains](MpiRuntime::Sweep when) mutable { return remains.end(when); });
}

}  // namespace conclave::inline v0::comm
