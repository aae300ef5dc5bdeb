#include "dispatch/call_checks.h"

#include "core/workspace_layout.h"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace conclave::inline v0::dispatch {
namespace {

void check_equal(std::string_view name, int64_t planned, int64_t found) {
  if (planned == found) return;
  throw Error(ErrorCode::kShape, {.what = "a dispatch argument differs from the plan",
                                  .tensor = std::string(name),
                                  .expected = std::to_string(planned),
                                  .found = std::to_string(found)});
}

}  // namespace

Support plannable(const DispatchProblem& problem) {
  const struct {
    std::string_view name;
    int64_t value;
    int64_t least;
  } sizes[] = {{"max_tokens", problem.max_tokens, 1},     {"top_k", problem.top_k, 1},
               {"rows_per_sum", problem.rows_per_sum, 1}, {"num_experts", problem.num_experts, 1},
               {"hidden_size", problem.hidden_size, 1},   {"row_bytes", problem.row_bytes, 1},
               {"ep_size", problem.ep_size, 1},           {"ep_rank", problem.ep_rank, 0}};
  for (const auto& [name, value, least] : sizes) {
    if (value < least) return Support::no(fmt::format("{} is {}, below {}", name, value, least));
  }
  if (problem.num_experts > std::numeric_limits<int32_t>::max()) {
    return Support::no(fmt::format("{} experts do not fit int32 ids", problem.num_experts));
  }
  if (problem.row_bytes % static_cast<int64_t>(kWorkspaceAlignment) != 0) {
    return Support::no(fmt::format("row_bytes {} is not a multiple of {}", problem.row_bytes,
                                   kWorkspaceAlignment));
  }
  if (problem.ep_rank >= problem.ep_size) {
    return Support::no(
        fmt::format("ep_rank {} is not below ep_size {}", problem.ep_rank, problem.ep_size));
  }
  if (problem.epoch != nullptr) {
    const ExpertPlacement& placed = problem.epoch->experts;
    if (placed.num_physical() != problem.num_experts || placed.num_ranks != problem.ep_size) {
      return Support::no(fmt::format("the placement is of {} experts on {} ranks, not {} on {}",
                                     placed.num_physical(), placed.num_ranks, problem.num_experts,
                                     problem.ep_size));
    }
  }
  return Support::yes();
}

std::shared_ptr<const PlacementEpoch> epoch_of(const DispatchProblem& problem) {
  if (problem.epoch != nullptr) return problem.epoch;
  return first_epoch(problem.num_experts, {.ep_size = problem.ep_size, .ep_rank = problem.ep_rank});
}

const PlacementEpoch& epoch_of(const DispatchArgs& args, const PlacementEpoch& planned) {
  if (args.epoch == nullptr || args.epoch == &planned) return planned;
  if (const Support support = can_follow(planned, *args.epoch); !support) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "dispatch was planned for another placement",
                                              .tensor = "epoch",
                                              .found = support.reason()});
  }
  return *args.epoch;
}

void require(const Support& support) {
  if (support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "this dispatcher cannot serve the problem", .found = support.reason()});
}

void check_dispatch(const DispatchProblem& problem, const Routing& routing, const RowBundle& rows) {
  if (routing.num_tokens < 0 || routing.num_tokens > problem.max_tokens) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "dispatch was planned for fewer tokens",
                                              .tensor = "num_tokens",
                                              .found = std::to_string(routing.num_tokens),
                                              .limit = std::to_string(problem.max_tokens)});
  }
  check_equal("top_k", problem.top_k, routing.top_k);
  check_equal("rows", routing.num_tokens, rows.num_rows);
  check_equal("rows of the last sum", 0, routing.num_tokens % problem.rows_per_sum);
  check_equal("row_bytes", problem.row_bytes, rows.row_bytes);
  if (rows.dtype != problem.row_dtype) {
    throw Error(ErrorCode::kDType, {.what = "a dispatch argument differs from the plan",
                                    .tensor = "rows",
                                    .expected = std::string(to_string(problem.row_dtype)),
                                    .found = std::string(to_string(rows.dtype))});
  }
}

void check_combine(const DispatchProblem& problem, const CombineArgs& args) {
  check_equal("top_k", problem.top_k, args.routing.top_k);
  if (problem.rows_per_sum > 1 && args.output.tag != OutputTag::kPerRow) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "sums of several rows need one output row per batch slot"});
  }
  if (args.out.shape.rank() != 2) {
    throw Error(ErrorCode::kShape, {.what = "combine needs a matrix",
                                    .tensor = "out",
                                    .expected = "[T, H]",
                                    .found = args.out.shape.to_string()});
  }
  check_equal("out", problem.hidden_size, args.out.shape[1]);
}

void check_workspace(std::span<const std::byte> workspace, size_t needed_bytes) {
  if (workspace.size() < needed_bytes) {
    throw Error(ErrorCode::kWorkspaceTooSmall,
                {.what = "the dispatch workspace is too small",
                 .tensor = "workspace",
                 .expected = fmt::format("{} bytes", needed_bytes),
                 .found = fmt::format("{} bytes", workspace.size())});
  }
  if (reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment != 0) {
    throw Error(ErrorCode::kMisaligned,
                {.what = "the dispatch workspace is misaligned",
                 .tensor = "workspace",
                 .expected = fmt::format("{}-byte alignment", kWorkspaceAlignment)});
  }
}

}  // namespace conclave::inline v0::dispatch
