// One connection of a rank to a peer, or to itself: whole messages in order, whatever pieces the
// stream has.
#pragma once

#include "comm/message/wire.h"
#include "comm/tcp/socket.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0::comm {

enum class FrameKind : uint32_t { kNotice = 1, kChunk = 2 };

struct FrameHead {
  FrameKind kind = FrameKind::kNotice;
  uint32_t bytes = 0;  // behind the head
  uint64_t epoch = 0;  // the port that sends it has this one
};
inline constexpr size_t kLargestFrame =
    sizeof(FrameHead) + sizeof(ChunkHeader) + static_cast<size_t>(kChunkBytes);

struct Frame {
  FrameKind kind = FrameKind::kNotice;
  uint64_t epoch = 0;
  std::span<const std::byte> body;  // valid until the next receive of this link
};

class Link {
 public:
  // Messages to the rank itself.
  Link() = default;
  // A connection that both sides have agreed on.
  explicit Link(Socket socket);

  // Sends what the stream takes and keeps the rest. Messages to a peer that is gone are dropped: it
  // shows where its own are read.
  void send(FrameHead frame, std::span<const std::byte> head, std::span<const std::byte> data);
  // Sends more of what was kept.
  void push() noexcept;
  // Nothing is kept, so that a message would not wait behind another.
  bool is_idle() const noexcept { return out_begin_ == out_.size(); }

  // Reads what has come, as far as it finds room.
  void receive();
  // True if a whole message has come: `frame` is the first. Throws PortFailure for what is none.
  bool peek(int32_t peer, Frame& frame) const;
  // Gives up the message that peek has shown.
  void drop(const Frame& frame) noexcept { in_begin_ += sizeof(FrameHead) + frame.body.size(); }

  // No more will come than what is here.
  bool has_ended() const noexcept { return ended_; }
  int fd() const noexcept { return socket_.fd(); }
  // All that was sent lies with the peer's system, or never will.
  bool is_confirmed() const noexcept;
  // Reads and forgets what comes.
  void drain() noexcept;
  void close() noexcept { socket_.close(); }

 private:
  bool is_self() const noexcept { return !is_peer_; }
  size_t held() const noexcept { return in_end_ - in_begin_; }
  void move_to_front() noexcept;
  std::byte* room_for(size_t bytes);
  void keep(std::span<const std::byte> bytes);

  Socket socket_;
  bool is_peer_ = false;
  std::vector<std::byte> out_;
  size_t out_begin_ = 0;
  std::vector<std::byte> in_;
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  bool broken_ = false;  // the peer takes no more
  bool ended_ = false;
};

}  // namespace conclave::inline v0::comm
