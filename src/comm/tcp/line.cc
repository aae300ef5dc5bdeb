#include "comm/tcp/line.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <sys/socket.h>
#include <type_traits>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

// Precedes the bytes of a proposal.
struct LineHead {
  uint64_t epoch = 0;
  uint64_t promised = 0;
  uint64_t accepted = 0;
  uint32_t ranks = 0;  // bytes behind the head
  uint8_t is_settled = 0;
  uint8_t is_gone = 0;
  std::array<uint8_t, 2> unused{};
};
static_assert(std::is_trivially_copyable_v<LineHead>);

constexpr uint32_t kMostRanks = 1U << 20U;

// Said by the system of the other side, when its process has ended or has closed the connection.
bool says_ended(int error) { return error == ECONNRESET || error == EPIPE; }

}  // namespace

Line::Line(Socket socket) : socket_(std::move(socket)) { set_options(socket_); }

void Line::send(const LineMessage& message) {
  if (!socket_.is_open() || ended_ || broken_) return;
  const WordCell& cell = message.cell;
  const LineHead head{.epoch = message.epoch,
                      .promised = cell.promised,
                      .accepted = cell.accepted,
                      .ranks = static_cast<uint32_t>(cell.value.size()),
                      .is_settled = static_cast<uint8_t>(cell.is_settled),
                      .is_gone = static_cast<uint8_t>(message.is_gone)};
  const auto first = std::as_bytes(std::span(&head, 1));
  const auto second = std::as_bytes(std::span(cell.value));
  out_.insert(out_.end(), first.begin(), first.end());
  out_.insert(out_.end(), second.begin(), second.end());
  push();
}

// A failure to send shows where the connection is read.
void Line::push() {
  if (out_.empty() || ended_ || broken_) return;
  const int64_t put = write_some(socket_.fd(), out_, {});
  if (put > 0) out_.erase(out_.begin(), out_.begin() + put);
  if (put < 0 && !would_block(errno) && !says_ended(errno)) broken_ = true;
}

void Line::receive() {
  std::array<std::byte, 4096> room;
  while (!ended_ && !broken_) {
    const int64_t got = read_some(socket_.fd(), room);
    if (got > 0) {
      in_.insert(in_.end(), room.begin(), room.begin() + got);
      confirm_at_once(socket_);
      continue;
    }
    if (got < 0 && would_block(errno)) return;
    ended_ = got == 0 || says_ended(errno);
    broken_ = !ended_;
  }
}

void Line::move() {
  if (!socket_.is_open()) return;
  push();
  receive();
}

std::optional<LineMessage> Line::take(uint64_t epoch) {
  while (in_.size() >= sizeof(LineHead)) {
    LineHead head;
    std::memcpy(&head, in_.data(), sizeof head);
    if (head.ranks > kMostRanks) {
      broken_ = true;
      return std::nullopt;
    }
    const size_t bytes = sizeof head + head.ranks;
    if (in_.size() < bytes || head.epoch > epoch) return std::nullopt;
    LineMessage message{.epoch = head.epoch,
                        .is_gone = head.is_gone != 0,
                        .cell = {.promised = head.promised,
                                 .accepted = head.accepted,
                                 .is_settled = head.is_settled != 0,
                                 .value = Present(head.ranks)}};
    if (head.ranks > 0) std::memcpy(message.cell.value.data(), &in_[sizeof head], head.ranks);
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(bytes));
    if (head.epoch == epoch) return message;
  }
  return std::nullopt;
}

bool Line::is_confirmed() const noexcept {
  if (!socket_.is_open() || ended_) return true;
  return !broken_ && out_.empty() && unconfirmed_bytes(socket_.fd()) == 0;
}

void Line::shut() noexcept {
  if (socket_.is_open()) ::shutdown(socket_.fd(), SHUT_WR);
}

}  // namespace conclave::inline v0::comm
