// Whether two ranks mean the same operation, for every transport.
#pragma once

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <cstdint>
#include <optional>
#include <string>

namespace conclave::inline v0::comm {

constexpr bool is_collective(CommKind kind) {
  return kind != CommKind::kSend && kind != CommKind::kRecv;
}
constexpr bool is_reduction(CommKind kind) {
  return kind == CommKind::kAllReduce || kind == CommKind::kReduceScatter;
}

// One rank says this of an operation to another.
struct Claim {
  CommKind kind = CommKind::kBarrier;
  DType dtype = DType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  int64_t offered = 0;   // bytes for the other rank
  int64_t expected = 0;  // bytes from it
};

// The reason why `theirs`, a claim of rank `peer`, does not go with `mine`, one of rank `me`: other
// operations, types or rules, or other bytes than expected.
std::optional<std::string> disagreement(const Claim& mine, int32_t me, const Claim& theirs,
                                        int32_t peer);

}  // namespace conclave::inline v0::comm
