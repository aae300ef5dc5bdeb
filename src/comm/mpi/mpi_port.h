// Messages of one rank over MPI. All bytes pass through buffers of this object, since MPI cannot
// always take an operation back.
#pragma once

#include "comm/message/message_port.h"
#include "comm/message/wire.h"
#include "comm/mpi/mpi_runtime.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mpi.h>
#include <optional>
#include <vector>

namespace conclave::inline v0::comm {

// The ranks of a port among those of an MPI communicator, which returns its errors and belongs to
// all ports on it. Ports that follow each other there differ in their epoch, and so in their tags.
struct PortGroup {
  std::shared_ptr<MPI_Comm> communicator;
  std::vector<int> members = {};  // [ranks] numbers in the communicator, ascending
  uint64_t epoch = 0;
};

// The lock is that of the runtime.
class MpiPort final : public MessagePort {
 public:
  // Takes over `communicator`, which returns its errors: all of its ranks.
  MpiPort(MpiRuntime& runtime, MPI_Comm communicator);
  MpiPort(MpiRuntime& runtime, PortGroup group);
  MpiPort(const MpiPort&) = delete;
  MpiPort& operator=(const MpiPort&) = delete;

  std::string_view name() const noexcept override { return "mpi"; }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return static_cast<int32_t>(group_.members.size()); }
  std::mutex& mutex() noexcept override { return runtime_.mutex(); }
  bool may_call() const noexcept override { return !is_inherited() && runtime_.may_call(); }
  void check_caller() const override;
  bool is_inherited() const noexcept override { return runtime_.is_inherited(); }
  Support takes_background() const override { return runtime_.takes_background(); }

  void post(int32_t peer, const Notice& notice, size_t payload_bytes) override;
  std::optional<ReceivedNotice> take_notice() override;
  bool send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data) override;
  uint64_t chunks_sent(int32_t peer) const noexcept override { return state_.out[at(peer)].begun; }
  void expect_chunks(int32_t peer, uint64_t count) override {
    state_.in[at(peer)].expected += count;
  }
  std::optional<ReceivedChunk> take_chunk(int32_t peer) override;
  uint64_t chunks_taken(int32_t peer) const noexcept override { return state_.in[at(peer)].ended; }

  uint64_t epoch() const noexcept override { return group_.epoch; }
  Support supports_survivors() const override;
  std::unique_ptr<MessagePort> survivors(const std::vector<int32_t>& ranks) override;

  void flush(std::chrono::nanoseconds deadline) noexcept override;
  // The runtime keeps the port until its last message has been read.
  void retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept override;
  // Ends all messages: nothing will come any more. True if MPI has let go of all buffers, and the
  // communicator is freed where no other port has followed on it.
  bool close() noexcept;
  // After a failure: gives back the buffers that MPI has let go of. What peers have sent and nobody
  // reads stays with MPI, and the communicator's number is not used again. True if that is all.
  bool release() noexcept;

 private:
  struct Chunk {
    ChunkHeader header;
    std::array<std::byte, kChunkBytes> data;
  };
  // Messages of one direction between this rank and a peer, which use two buffers in turn.
  struct Stream {
    std::array<std::unique_ptr<Chunk>, 2> buffers;  // made for the first message
    std::array<MPI_Request, 2> requests = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    uint64_t expected = 0;  // messages that the peer has announced
    uint64_t begun = 0;
    uint64_t ended = 0;
  };
  struct Control {
    Notice notice;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct State {
    std::deque<Control> control;
    Control arriving;
    std::vector<Stream> out, in;  // [ranks]
  };

  static size_t at(int32_t peer) { return static_cast<size_t>(peer); }
  static Chunk& buffer(Stream& stream, uint64_t message);
  static void give_back(Stream& stream) noexcept;
  int member(int32_t peer) const { return group_.members[at(peer)]; }
  int tag(int of_first_epoch) const;
  int32_t number_of(int member) const;
  void post_receives(int32_t peer);
  bool all_sent() noexcept;
  bool all_cancelled() noexcept;

  MpiRuntime& runtime_;
  PortGroup group_;
  int32_t rank_ = 0;
  State state_;
};

}  // namespace conclave::inline v0::comm
