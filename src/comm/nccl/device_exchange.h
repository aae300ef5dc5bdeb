// An operation on device memory enqueues claims, bytes by NCCL and sums in rank order. Nothing
// here allocates after construction or waits, so that graphs can have it.
#pragma once

#include "comm/agreement.h"
#include "comm/nccl/device_steps.h"
#include "comm/nccl/nccl_group.h"
#include "comm/nccl/peer_windows.h"
#include "comm/nccl/window_exchange.h"
#include "comm/one_launch.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/comm.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace conclave::inline v0::comm {

// For addends of other ranks on their way: longer sums go by pieces that fit.
inline constexpr int64_t kStagingBytes = int64_t{32} << 20;

class DeviceExchange {
 public:
  // On the current device. `group` and `windows`, which may be null, outlive it; `stop` is not 0
  // once kernels are to wait for no peer any more.
  DeviceExchange(NcclGroup& group, int32_t rank, int32_t ranks, const PeerWindows* windows,
                 const uint32_t* stop);

  // The marks stand at the place, whose counters this has; `stream` gets everything.
  void collective(const CommOperation& operation, MarkPlace place, CUstream_st* stream);
  // The same for an all-to-all whose bytes `kernel` moves; there are windows.
  void through_windows(const CommOperation& operation, const WindowKernel& kernel, MarkPlace place,
                       CUstream_st* stream);
  // Messages begun together, at most kMaxClaims: ranks that send to each other do not wait for each
  // other. One to this rank itself comes with its other half.
  void messages(std::span<const CommOperation> operations, MarkPlace place, CUstream_st* stream);

  // Where all ranks have come to the same collective and the device does not end it: what this rank
  // and a peer mean, if that differs. From any thread; waits for a copy, which is bounded.
  std::optional<ClaimPair> find_disagreement() const;

 private:
  void move_messages(std::span<const CommOperation> operations, CUstream_st* stream) const;
  bool has_peers() const { return ranks_ > 1; }
  template <class Body>
  void for_each_peer(const Body& body) const;
  DeviceClaims claims_of(const CommOperation& operation) const;
  // Opens the first launch of a collective, whose first messages are the claims.
  void exchange_claims(NcclGroup::Calls& calls) const;
  void move_bytes(const CommOperation& operation, CUstream_st* stream);
  void all_to_all(const AllToAllV& exchange, CUstream_st* stream);
  void all_gather(const CommOperation& operation, CUstream_st* stream);
  void all_reduce(const CommOperation& operation, CUstream_st* stream);
  void reduce_at_once(const CommOperation& operation, CUstream_st* stream);
  void reduce_by_blocks(const CommOperation& operation, CUstream_st* stream);
  void reduce_scatter(const CommOperation& operation, CUstream_st* stream);
  void copy(const std::byte* from, std::byte* to, int64_t bytes, CUstream_st* stream) const;
  void copy_own_messages(std::span<const CommOperation> operations, CUstream_st* stream) const;
  // Has room for an addend of each other rank.
  int64_t piece_bytes() const;
  std::byte* staged(int32_t peer) const;
  OrderedParts parts(const std::byte* own) const;

  NcclGroup& group_;
  int32_t rank_;
  int32_t ranks_;
  cuda::DeviceBuffer counters_;
  cuda::DeviceBuffer claims_out_;
  cuda::DeviceBuffer claims_in_;
  cuda::DeviceBuffer staging_;
  std::optional<WindowExchange> windows_;
  cuda::OwnedStream copies_;  // beside one that is stuck
};

// Whether both sides of an exchange mean the same.
inline bool agree(const DeviceClaim& mine, const DeviceClaim& theirs) {
  return mine.code == theirs.code && mine.expected == theirs.offered &&
         mine.offered == theirs.expected;
}

// Says in words what differs.
std::string text_of(const ClaimPair& claims, int32_t rank);

}  // namespace conclave::inline v0::comm
