#include "dispatch/ep_exchange.h"

namespace conclave::inline v0::dispatch {

CommHandle Exchange::begin(Communicator& communicator, const RowCounts& counts, int64_t row_bytes,
                           const void* send, void* recv, std::span<std::byte> workspace) const {
  const auto ranks = static_cast<size_t>(ranks_);
  int64_t* const arrays = slice_as<int64_t>(workspace, arrays_);
  const std::span<int64_t> send_bytes(arrays, ranks);
  const std::span<int64_t> send_offsets(arrays + ranks, ranks);
  const std::span<int64_t> recv_bytes(arrays + 2 * ranks, ranks);
  const std::span<int64_t> recv_offsets(arrays + 3 * ranks, ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    send_bytes[rank] = counts.send_rows[rank] * row_bytes;
    send_offsets[rank] = counts.send_base[rank] * row_bytes;
    recv_bytes[rank] = counts.recv_rows[rank] * row_bytes;
    recv_offsets[rank] = counts.recv_base[rank] * row_bytes;
  }
  return communicator.begin({.kind = CommKind::kAllToAllV,
                             .exchange = {.send = static_cast<const std::byte*>(send),
                                          .send_bytes = send_bytes,
                                          .send_offsets = send_offsets,
                                          .recv = static_cast<std::byte*>(recv),
                                          .recv_bytes = recv_bytes,
                                          .recv_offsets = recv_offsets},
                             .in_background = moves_ == MovesBytes::kInBackground});
}

}  // namespace conclave::inline v0::dispatch
