#include "dispatch/ep_wire.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int64_t kWireVersion = 2;

struct Field {
  std::string_view name;
  int64_t WireHeader::*value;
};
constexpr std::array kPlanFields = {
    Field{"wire version", &WireHeader::version},
    Field{"max_tokens", &WireHeader::max_tokens},
    Field{"top_k", &WireHeader::top_k},
    Field{"num_experts", &WireHeader::num_experts},
    Field{"hidden_size", &WireHeader::hidden_size},
    Field{"row_bytes", &WireHeader::row_bytes},
    Field{"row_dtype", &WireHeader::row_dtype},
    Field{"ep_size", &WireHeader::ep_size},
    Field{"placement", &WireHeader::placement},
    Field{"transport", &WireHeader::transport},
    Field{"combine", &WireHeader::combine},
    Field{"placement epoch", &WireHeader::epoch},
};

}  // namespace

WireHeader make_header(const EpPlan& plan, uint64_t epoch, int64_t num_rows) {
  const DispatchProblem& problem = plan.problem;
  return {.version = kWireVersion,
          .max_tokens = problem.max_tokens,
          .top_k = problem.top_k,
          .num_experts = problem.num_experts,
          .hidden_size = problem.hidden_size,
          .row_bytes = problem.row_bytes,
          .row_dtype = static_cast<int64_t>(problem.row_dtype),
          .ep_size = problem.ep_size,
          .placement = static_cast<int64_t>(problem.epoch->experts.strategy),
          .transport = static_cast<int64_t>(problem.transport),
          .combine = static_cast<int64_t>(problem.combine),
          .epoch = static_cast<int64_t>(epoch),
          .num_rows = num_rows};
}

int64_t checked_rows(const EpPlan& plan, uint64_t epoch, const WireHeader& theirs, int32_t rank) {
  const WireHeader ours = make_header(plan, epoch, 0);
  for (const Field& field : kPlanFields) {
    if (theirs.*field.value == ours.*field.value) continue;
    throw CommError(
        ErrorCode::kCommMismatch, rank, "dispatch.plan",
        fmt::format("ranks disagree on {}: rank {} has {}, rank {} has {}", field.name, rank,
                    theirs.*field.value, plan.problem.ep_rank, ours.*field.value));
  }
  const int64_t most = plan.num_local_experts == 0 ? 0 : plan.problem.max_tokens;
  if (theirs.num_rows < 0 || theirs.num_rows > most) {
    throw CommError(
        ErrorCode::kCommMismatch, rank, "dispatch.plan",
        fmt::format("rank {} announces {} rows, outside 0 to {}", rank, theirs.num_rows, most));
  }
  return theirs.num_rows;
}

}  // namespace conclave::inline v0::dispatch
