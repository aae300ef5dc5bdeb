#include "comm/local/operation.h"

namespace conclave::inline v0::comm {
namespace {

// Bytes that `mine` expects from `peer`. Reductions need the same vector from every rank.
int64_t expected_bytes(const Operation& mine, int32_t peer) {
  switch (mine.kind) {
    case CommKind::kAllToAllV:
      return mine.recv_counts[static_cast<size_t>(peer)];
    case CommKind::kRecv:
      return mine.recv_bytes;
    default:
      return mine.send_bytes;
  }
}

}  // namespace

Block block_for(const Operation& from, int32_t to) {
  if (from.kind != CommKind::kAllToAllV) return {from.send, from.send_bytes};
  const auto at = static_cast<size_t>(to);
  const int64_t bytes = from.send_counts[at];
  return {bytes == 0 ? nullptr : from.send + from.send_offsets[at], bytes};
}

std::byte* destination_of(const Operation& mine, int32_t from) {
  switch (mine.kind) {
    case CommKind::kAllToAllV:
      return mine.recv + mine.recv_offsets[static_cast<size_t>(from)];
    case CommKind::kAllGather:
      return mine.recv + from * mine.send_bytes;
    default:
      return mine.recv;
  }
}

std::optional<std::string> disagreement(const Operation& mine, int32_t me, const Operation& theirs,
                                        int32_t peer) {
  return disagreement(Claim{.kind = mine.kind,
                            .dtype = mine.dtype,
                            .reduce = mine.reduce,
                            .expected = expected_bytes(mine, peer)},
                      me,
                      Claim{.kind = theirs.kind,
                            .dtype = theirs.dtype,
                            .reduce = theirs.reduce,
                            .offered = block_for(theirs, me).bytes},
                      peer);
}

}  // namespace conclave::inline v0::comm
