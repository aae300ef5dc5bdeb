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
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {

// The connections of one rank to those of its first group, that to the rank itself among them. They
// belong to all ports on them, which follow each other and differ in their epoch.
struct TcpConnections {
  explicit TcpConnections(std::vector<Link> to_all) : links(std::move(to_all)) {}

  std::mutex mutex;
  std::vector<Link> links;
  uint64_t epoch = 0;  // the last port has this one
};

// The ranks of a port among those connections.
struct TcpGroup {
  std::shared_ptr<TcpConnections> connections;
  std::vector<int32_t> members = {};  // [ranks] numbers of connections, ascending
  uint64_t epoch = 0;
};

class TcpPort final : public MessagePort {
 public:
  // All ranks that the connections lead to, this one being `rank`.
  TcpPort(int32_t rank, std::vector<Link> links);
  TcpPort(int32_t rank, TcpGroup group);
  TcpPort(const TcpPort&) = delete;
  TcpPort& operator=(const TcpPort&) = delete;

  std::string_view name() const noexcept override { return "tcp"; }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return static_cast<int32_t>(peers_.size()); }
  std::mutex& mutex() noexcept override { return group_.connections->mutex; }
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
  void give_chunks_up() noexcept override { drops_chunks_ = true; }
  bool has_handed_over(int32_t peer) const noexcept override { return link(peer).is_idle(); }
  bool is_cut_off(int32_t peer) const noexcept override;
  bool shows_ends() const noexcept override { return true; }
  void rest(int64_t round) noexcept override;

  uint64_t epoch() const noexcept override { return group_.epoch; }
  Support supports_survivors() const override { return Support::yes(); }
  std::unique_ptr<MessagePort> survivors(const std::vector<int32_t>& ranks) override;

  void flush(std::chrono::nanoseconds deadline) noexcept override;
  void retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept override;

 private:
  struct Peer {
    uint64_t chunks_sent = 0;
    uint64_t chunks_taken = 0;
  };

  static size_t at(int32_t peer) { return static_cast<size_t>(peer); }
  Link& link(int32_t peer) const { return group_.connections->links[at(group_.members[at(peer)])]; }
  // False once its ranks have gone on: what comes is for the port that follows.
  bool is_last() const noexcept { return group_.connections->epoch == group_.epoch; }
  // The peer's first message of this epoch, if a whole one is here.
  bool peek(int32_t peer, Frame& frame) const;
  // The same if one of this kind is there or comes now.
  bool find(int32_t peer, FrameKind kind, Frame& frame);

  int32_t rank_;
  int64_t pid_;
  TcpGroup group_;
  bool drops_chunks_ = false;
  std::vector<Peer> peers_;
  Notice arrived_;
};

}  // namespace conclave::inline v0::comm
