// Messages of one rank over a connection to each peer. A peer that dies ends its connection, so
// that its loss is seen at once on any host.
#pragma once

#include "comm/message/message_port.h"
#include "comm/tcp/link.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

class TcpPort final : public MessagePort {
 public:
  // Takes over a connection to every rank, in rank order; that to `rank` is to itself.
  TcpPort(int32_t rank, std::vector<Link> links);
  TcpPort(const TcpPort&) = delete;
  TcpPort& operator=(const TcpPort&) = delete;

  std::string_view name() const noexcept override { return "tcp"; }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return static_cast<int32_t>(peers_.size()); }
  std::mutex& mutex() noexcept override { return mutex_; }
  bool may_call() const noexcept override { return !is_inherited(); }
  void check_caller() const override;
  bool is_inherited() const noexcept override;

  void post(int32_t peer, const Notice& notice, size_t payload_bytes) override;
  std::optional<ReceivedNotice> take_notice() override;
  bool send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data) override;
  uint64_t chunks_sent(int32_t peer) const noexcept override {
    return peers_[at(peer)].chunks_sent;
  }
  // A connection brings its messages in order: nothing is to be prepared.
  void expect_chunks(int32_t, uint64_t) override {}
  std::optional<ReceivedChunk> take_chunk(int32_t peer) override;
  uint64_t chunks_taken(int32_t peer) const noexcept override {
    return peers_[at(peer)].chunks_taken;
  }
  bool has_handed_over(int32_t peer) const noexcept override {
    return peers_[at(peer)].link.is_idle();
  }
  bool is_cut_off(int32_t peer) const noexcept override;
  void rest(int64_t round) noexcept override;

  void flush(std::chrono::nanoseconds deadline) noexcept override;
  void retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept override;

 private:
  struct Peer {
    Link link;
    uint64_t chunks_sent = 0;
    uint64_t chunks_taken = 0;
  };

  static size_t at(int32_t peer) { return static_cast<size_t>(peer); }
  // The peer's first message, if a whole one of this kind is there or comes now.
  bool find(int32_t peer, FrameKind kind, Frame& frame);

  int32_t rank_;
  int64_t pid_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  Notice arrived_;
};

}  // namespace conclave::inline v0::comm
