#include "comm/agreement.h"

#include <fmt/format.h>

namespace conclave::inline v0::comm {

std::optional<std::string> disagreement(const Claim& mine, int32_t me, const Claim& theirs,
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
  if (mine.expected != theirs.offered) {
    return fmt::format("{}: rank {} offers {} bytes where rank {} expects {}", to_string(mine.kind),
                       peer, theirs.offered, me, mine.expected);
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0::comm
