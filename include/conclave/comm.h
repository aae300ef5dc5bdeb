// The Communicator seam: how ranks exchange rows and sums. Every wait has a deadline; a lost or
// late peer is a CommError naming peer and phase, never a hang.
#pragma once

#include "conclave/dtype.h"
#include "conclave/version.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// Byte counts and offsets per peer, each of length size().
struct AllToAllV {
  const std::byte* send = nullptr;
  std::span<const int64_t> send_bytes;
  std::span<const int64_t> send_offsets;
  std::byte* recv = nullptr;
  std::span<const int64_t> recv_bytes;
  std::span<const int64_t> recv_offsets;
};

enum class ReduceOp : uint8_t { kSum, kMax };

// An operation under way. Buffers given to begin_* must live until wait returns or throws.
struct CommHandle {
  uint64_t sequence = 0;
};

// Collectives: all ranks call the same ones in the same order. At most one thread per rank.
class CONCLAVE_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual int32_t rank() const noexcept = 0;
  virtual int32_t size() const noexcept = 0;
  virtual std::chrono::nanoseconds timeout() const noexcept = 0;

  virtual CommHandle begin_all_to_all_v(const AllToAllV& exchange) = 0;
  // recv.size() == send.size() * size(); block r comes from rank r.
  virtual CommHandle begin_all_gather(std::span<const std::byte> send,
                                      std::span<std::byte> recv) = 0;
  // Elementwise over ranks, in rank order (deterministic); dtype kF32, kF64, kI32 or kI64.
  // send.size() == recv.size().
  virtual CommHandle begin_all_reduce(std::span<const std::byte> send, std::span<std::byte> recv,
                                      DType dtype, ReduceOp op) = 0;
  // Block r of the reduced vector goes to rank r; send.size() == recv.size() * size().
  virtual CommHandle begin_reduce_scatter(std::span<const std::byte> send,
                                          std::span<std::byte> recv, DType dtype, ReduceOp op) = 0;
  virtual CommHandle begin_send(int32_t peer, std::span<const std::byte> data) = 0;
  virtual CommHandle begin_recv(int32_t peer, std::span<std::byte> data) = 0;
  virtual CommHandle begin_barrier() = 0;

  // Returns when the operation is complete on this rank. Throws CommError: kCommTimeout after
  // `deadline`, kCommPeerLost, kCommMismatch where ranks disagree on sizes or operations,
  // kCommAborted. `phase` names the step in the error. After an error the communicator is unusable.
  virtual void wait(CommHandle handle, std::chrono::nanoseconds deadline,
                    std::string_view phase) = 0;

  // Makes every present and later wait of every rank fail with kCommAborted.
  virtual void abort(std::string_view reason) noexcept = 0;

  // begin + wait with timeout().
  void all_to_all_v(const AllToAllV& exchange, std::string_view phase);
  void all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                  std::string_view phase);
  void all_reduce(std::span<const std::byte> send, std::span<std::byte> recv, DType dtype,
                  ReduceOp op, std::string_view phase);
  void reduce_scatter(std::span<const std::byte> send, std::span<std::byte> recv, DType dtype,
                      ReduceOp op, std::string_view phase);
  void send(int32_t peer, std::span<const std::byte> data, std::string_view phase);
  void recv(int32_t peer, std::span<std::byte> data, std::string_view phase);
  void barrier(std::string_view phase);
};

// `num_ranks` communicators for threads of this process. Each keeps the shared state alive; each is
// used by one thread. Destroying one makes its peers' waits fail with kCommPeerLost.
struct LocalGroupOptions {
  int32_t num_ranks = 1;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
};
CONCLAVE_API std::vector<std::unique_ptr<Communicator>> make_local_group(
    const LocalGroupOptions& options);

}  // namespace conclave::inline v0
