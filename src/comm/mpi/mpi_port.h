// Messages of one rank over MPI. All bytes pass through buffers of this object: MPI cannot always
// take an operation back, and memory of the caller must be free when a wait has failed.
#pragma once

#include "comm/mpi/mpi_wire.h"

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

struct ReceivedNotice {
  int32_t peer = -1;
  const Notice* notice = nullptr;  // valid until the next call of take_notice
};
struct ReceivedChunk {
  ChunkHeader header;
  const std::byte* data = nullptr;  // valid until the next call of take_chunk for that peer
};

// Every call needs the lock of the runtime. None blocks, and all but close throw MpiFailure.
class MpiPort {
 public:
  // Takes over `communicator`, which returns its errors.
  explicit MpiPort(MPI_Comm communicator);
  MpiPort(const MpiPort&) = delete;
  MpiPort& operator=(const MpiPort&) = delete;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }

  // Sends the notice and the first `payload_bytes` of its payload.
  void post(int32_t peer, const Notice& notice, size_t payload_bytes);
  std::optional<ReceivedNotice> take_notice();

  // False while the buffers for this peer are under way.
  bool send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data);
  uint64_t chunks_sent(int32_t peer) const { return state_.out[at(peer)].begun; }
  // The peer will send so many more.
  void expect_chunks(int32_t peer, uint64_t count) { state_.in[at(peer)].expected += count; }
  std::optional<ReceivedChunk> take_chunk(int32_t peer);
  uint64_t chunks_taken(int32_t peer) const { return state_.in[at(peer)].ended; }

  // Waits until what was sent has left this rank, but not longer.
  void flush(std::chrono::nanoseconds deadline) noexcept;
  // Ends all messages: nothing will come any more. True if MPI has let go of all buffers, and the
  // communicator is freed.
  bool close() noexcept;

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
  void post_receives(int32_t peer);
  bool all_sent() noexcept;

  MPI_Comm communicator_;
  int32_t rank_ = 0;
  int32_t size_ = 1;
  State state_;
};

}  // namespace conclave::inline v0::comm
