#include "comm/tcp/tcp_port.h"

#include "comm/message/pause.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <poll.h>
#include <span>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

static_assert(std::is_trivially_copyable_v<Notice> && std::is_trivially_copyable_v<ChunkHeader>);
constexpr size_t kNoticeHead = offsetof(Notice, payload);

// A peer that computes answers within microseconds of its turn, if it has a core.
constexpr int64_t kYields = 64;
constexpr int kLongestRestMs = 1;
constexpr int32_t kSelfBuffers = 2;

std::span<const std::byte> bytes_of(const Notice& notice, size_t bytes) {
  return {reinterpret_cast<const std::byte*>(&notice), bytes};
}

TcpGroup whole_group(std::vector<Link> links) {
  TcpGroup group{.connections = std::make_shared<TcpConnections>(std::move(links))};
  group.members.resize(group.connections->links.size());
  std::iota(group.members.begin(), group.members.end(), 0);
  return group;
}

}  // namespace

TcpPort::TcpPort(int32_t rank, std::vector<Link> links)
    : TcpPort(rank, whole_group(std::move(links))) {}

TcpPort::TcpPort(int32_t rank, TcpGroup group)
    : rank_(rank), pid_(::getpid()), group_(std::move(group)), peers_(group_.members.size()) {
  group_.connections->epoch = group_.epoch;
}

std::unique_ptr<MessagePort> TcpPort::survivors(const std::vector<int32_t>& ranks) {
  TcpGroup group{.connections = group_.connections, .epoch = group_.epoch + 1};
  for (const int32_t rank : ranks) group.members.push_back(group_.members[at(rank)]);
  const auto place = std::ranges::find(ranks, rank_);
  return std::make_unique<TcpPort>(static_cast<int32_t>(place - ranks.begin()), std::move(group));
}

bool TcpPort::is_inherited() const noexcept { return pid_ != ::getpid(); }

void TcpPort::check_caller() const {
  if (!is_inherited()) return;
  throw Error(ErrorCode::kForked, {.what = "connections of ranks are those of the parent process",
                                   .hint = "connect after the fork"});
}

void TcpPort::post(int32_t peer, const Notice& notice, size_t payload_bytes) {
  if (!is_last()) return;
  link(peer).send({.kind = FrameKind::kNotice, .epoch = group_.epoch},
                  bytes_of(notice, kNoticeHead + payload_bytes), {});
}

// Late messages of the groups before are dropped. One of a later group stays for the port there,
// since its sender has gone on before this rank.
bool TcpPort::peek(int32_t peer, Frame& frame) const {
  Link& from = link(peer);
  while (from.peek(peer, frame)) {
    if (frame.epoch > group_.epoch) return false;
    const bool is_dropped = drops_chunks_ && frame.kind == FrameKind::kChunk;
    if (frame.epoch == group_.epoch && !is_dropped) return true;
    from.drop(frame);
  }
  return false;
}

bool TcpPort::find(int32_t peer, FrameKind kind, Frame& frame) {
  if (!is_last()) return false;
  if (!peek(peer, frame)) {
    link(peer).receive();
    if (!peek(peer, frame)) return false;
  }
  return frame.kind == kind;
}

std::optional<ReceivedNotice> TcpPort::take_notice() {
  for (int32_t from = 0; from < size(); ++from) {
    Frame frame;
    if (!find(from, FrameKind::kNotice, frame)) continue;
    std::memcpy(static_cast<void*>(&arrived_), frame.body.data(), frame.body.size());
    link(from).drop(frame);
    return ReceivedNotice{.peer = from, .notice = &arrived_};
  }
  return std::nullopt;
}

bool TcpPort::send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data) {
  Peer& to = peers_[at(peer)];
  link(peer).push();
  if (!link(peer).is_idle()) return false;
  if (peer == rank_ && to.chunks_sent - to.chunks_taken >= kSelfBuffers) return false;
  link(peer).send({.kind = FrameKind::kChunk, .epoch = group_.epoch},
                  {reinterpret_cast<const std::byte*>(&header), sizeof header},
                  {data, static_cast<size_t>(header.bytes)});
  ++to.chunks_sent;
  return true;
}

std::optional<ReceivedChunk> TcpPort::take_chunk(int32_t peer) {
  Peer& from = peers_[at(peer)];
  link(peer).push();
  Frame frame;
  if (!find(peer, FrameKind::kChunk, frame)) return std::nullopt;
  ReceivedChunk chunk;
  std::memcpy(&chunk.header, frame.body.data(), sizeof chunk.header);
  const std::span<const std::byte> data = frame.body.subspan(sizeof chunk.header);
  if (chunk.header.bytes != static_cast<int64_t>(data.size())) {
    throw PortFailure("a message has another length than it says", peer);
  }
  chunk.data = data.data();
  link(peer).drop(frame);
  ++from.chunks_taken;
  return chunk;
}

bool TcpPort::is_cut_off(int32_t peer) const noexcept {
  if (!link(peer).has_ended()) return false;
  try {
    Frame frame;
    return !peek(peer, frame);
  } catch (const PortFailure&) {
    return true;  // whoever takes the message says so
  }
}

void TcpPort::rest(int64_t round) noexcept {
  if (round < kYields) return std::this_thread::yield();
  // More ranks than these are looked at by the clock.
  constexpr size_t kMost = 256;
  pollfd waiting[kMost];
  nfds_t count = 0;
  std::unique_lock lock(mutex());  // an abort of another thread may be sending
  for (int32_t peer = 0; peer < size(); ++peer) {
    const Link& one = link(peer);
    if (one.fd() < 0 || one.has_ended() || count == kMost) continue;
    const short output = one.is_idle() ? 0 : POLLOUT;
    waiting[count++] = {
        .fd = one.fd(), .events = static_cast<short>(POLLIN | output), .revents = 0};
  }
  lock.unlock();
  if (count == 0) return rest_by_the_clock(round);
  ::poll(waiting, count, kLongestRestMs);
}

void TcpPort::flush(std::chrono::nanoseconds deadline) noexcept {
  if (!is_last()) return;
  const auto until = std::chrono::steady_clock::now() + deadline;
  // A connection that is closed with bytes unread takes back what its peer has not got yet.
  while (true) {
    bool over = true;
    for (int32_t peer = 0; peer < size(); ++peer) {
      Link& one = link(peer);
      one.push();
      one.drain();
      over = one.is_confirmed() && over;
    }
    if (over || std::chrono::steady_clock::now() >= until) return;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void TcpPort::retire(std::unique_ptr<MessagePort>, const Leaving&) noexcept {}

}  // namespace conclave::inline v0::comm
