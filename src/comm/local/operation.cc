#include "comm/local/operation.h"

#include <fmt/format.h>

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
  if (is_collective(mine.kind) && mine.kind != theirs.kind) {
    return fmt::format("rank {} is in {} where rank {} is in {}", peer, to_string(theirs.kind), me,
                       to_string(mine.kind));
  }
  if (is_reduction(mine.kind) && (mine.dtype != theirs.dtype || mine.reduce != theirs.reduce)) {
    const auto op_name = [](ReduceOp op) { return op == ReduceOp::kSum ? "sum" : "max"; };
    return fmt::format("{}: rank {} reduces {} by {} where rank {} reduces {} by {}",
                       to_string(mine.kind), peer, conclave::to_string(theirs.dtype),
                       op_name(theirs.reduce), me, conclave::to_string(mine.dtype),
                       op_name(mine.reduce));
  }
  const int64_t expected = expected_bytes(mine, peer);
  const int64_t offered = block_for(theirs, me).bytes;
  if (expected != offered) {
    return fmt::format("{}: rank {} offers {} bytes where rank {} expects {}", to_string(mine.kind),
                       peer, offered, me, expected);
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0::comm
