#include "comm/tcp/link.h"

#include "comm/message/message_port.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

// One message may be in use while the next one comes.
constexpr size_t kRoom = 2 * kLargestFrame;
constexpr size_t kNoticeHead = offsetof(Notice, payload);

bool is_possible(const FrameHead& head) {
  switch (head.kind) {
    case FrameKind::kNotice:
      return head.bytes >= kNoticeHead && head.bytes <= sizeof(Notice);
    case FrameKind::kChunk:
      return head.bytes >= sizeof(ChunkHeader) && head.bytes <= kLargestFrame - sizeof(FrameHead);
  }
  return false;
}

}  // namespace

Link::Link(Socket socket) : socket_(std::move(socket)), is_peer_(true) {
  set_options(socket_);
  in_.resize(kRoom);
}

void Link::send(FrameHead frame, std::span<const std::byte> head, std::span<const std::byte> data) {
  if (broken_) return;
  frame.bytes = static_cast<uint32_t>(head.size() + data.size());
  std::array<std::byte, sizeof frame + sizeof(Notice)> front;
  std::memcpy(front.data(), &frame, sizeof frame);
  std::memcpy(front.data() + sizeof frame, head.data(), head.size());
  const std::span<const std::byte> first(front.data(), sizeof frame + head.size());
  if (is_self()) {
    std::byte* const at = room_for(first.size() + data.size());
    std::memcpy(at, first.data(), first.size());
    if (!data.empty()) std::memcpy(at + first.size(), data.data(), data.size());
    in_end_ += first.size() + data.size();
    return;
  }
  push();
  size_t sent = 0;
  if (is_idle() && !broken_) {
    const int64_t put = write_some(socket_.fd(), first, data);
    broken_ = put < 0 && !would_block(errno);
    sent = put < 0 ? 0 : static_cast<size_t>(put);
  }
  if (broken_) return;
  keep(first.subspan(std::min(sent, first.size())));
  keep(data.subspan(sent < first.size() ? 0 : sent - first.size()));
}

void Link::keep(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (is_idle()) {
    out_.clear();
    out_begin_ = 0;
  }
  out_.insert(out_.end(), bytes.begin(), bytes.end());
}

void Link::push() noexcept {
  while (!is_idle() && !broken_) {
    const std::span<const std::byte> rest(out_.data() + out_begin_, out_.size() - out_begin_);
    const int64_t put = write_some(socket_.fd(), rest, {});
    if (put < 0) {
      broken_ = !would_block(errno);
      break;
    }
    out_begin_ += static_cast<size_t>(put);
  }
  if (broken_) out_begin_ = out_.size();
}

void Link::move_to_front() noexcept {
  const size_t bytes = held();
  if (bytes > 0) std::memmove(in_.data(), in_.data() + in_begin_, bytes);
  in_begin_ = 0;
  in_end_ = bytes;
}

// Only messages to the rank itself may need more than there is.
std::byte* Link::room_for(size_t bytes) {
  if (in_.size() - in_end_ < bytes) {
    move_to_front();
    if (in_.size() - in_end_ < bytes) in_.resize(std::max(in_end_ + bytes, 2 * in_.size()));
  }
  return in_.data() + in_end_;
}

void Link::receive() {
  if (is_self() || ended_) return;
  if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
  if (in_.size() - in_begin_ < kLargestFrame) move_to_front();
  if (in_end_ == in_.size()) return;
  const int64_t got = read_some(socket_.fd(), std::span(in_).subspan(in_end_));
  if (got > 0) {
    in_end_ += static_cast<size_t>(got);
  } else {
    ended_ = got == 0 || !would_block(errno);
  }
}

bool Link::peek(int32_t peer, Frame& frame) const {
  if (held() < sizeof(FrameHead)) return false;
  FrameHead head;
  std::memcpy(&head, in_.data() + in_begin_, sizeof head);
  if (!is_possible(head)) {
    throw PortFailure(fmt::format("rank {} sent what is no message", peer), peer);
  }
  if (held() - sizeof head < head.bytes) return false;
  frame = {.kind = head.kind,
           .epoch = head.epoch,
           .body = std::span(in_).subspan(in_begin_ + sizeof head, head.bytes)};
  return true;
}

bool Link::is_confirmed() const noexcept {
  if (is_self() || broken_ || ended_) return true;
  return is_idle() && unconfirmed_bytes(socket_.fd()) == 0;
}

void Link::drain() noexcept {
  if (is_self()) return;
  in_begin_ = in_end_ = 0;
  for (int rounds = 0; rounds < 64 && !ended_; ++rounds) {
    const int64_t got = read_some(socket_.fd(), in_);
    if (got > 0) continue;
    ended_ = got == 0 || !would_block(errno);
    return;
  }
}

}  // namespace conclave::inline v0::comm
