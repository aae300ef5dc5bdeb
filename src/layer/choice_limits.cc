#include "layer/choice_limits.h"

#include "layer/arguments.h"
#include "routing/limits.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

void check_number(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a limit of the call is out of range",
               .tensor = field,
               .found = std::to_string(value),
               .limit = std::to_string(low) + " to " + std::to_string(high)});
}

void check_bans(const ConstTensorView& banned, int64_t rows, int64_t columns) {
  if (banned.shape.rank() == 2) {
    return check_matrix("banned_experts", banned, {rows, columns}, {DType::kBool});
  }
  if (banned.data == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "an argument has no data", .tensor = "banned_experts"});
  }
  check_vector("banned_experts", banned, columns, {DType::kBool});
}

// Every token chooses among at least as many experts as it has slots.
void check_enough_are_left(const ChoiceLimits& limits, int64_t choices, int64_t columns,
                           int64_t tokens) {
  const ConstTensorView& banned = limits.banned_experts;
  const bool by_token = banned.shape.rank() == 2;
  const int64_t stride = banned.row_stride != 0 ? banned.row_stride : columns;
  const auto* flags = static_cast<const uint8_t*>(banned.data);
  const auto* padding = static_cast<const uint8_t*>(limits.padding_mask.data);
  for (int64_t token = 0; token < (by_token ? tokens : std::min<int64_t>(tokens, 1)); ++token) {
    if (by_token && padding != nullptr && padding[token] == 0) continue;
    const uint8_t* const row = flags + (by_token ? token * stride : 0);
    const int64_t left = std::count(row, row + columns, uint8_t{0});
    if (left >= choices) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = by_token ? "too few experts are left at token " + std::to_string(token)
                                  : "too few experts are left",
                 .tensor = "banned_experts",
                 .found = std::to_string(left) + " of " + std::to_string(columns),
                 .limit = "at least " + std::to_string(choices) + ", the choices of a token",
                 .hint = "ban fewer, or ask for a smaller top_k"});
  }
}

}  // namespace

ChoiceLimits ChoiceLimits::of(const ForwardArgs& args) {
  return {.top_k = args.top_k,
          .banned_experts = args.banned_experts,
          .expert_budget = args.expert_budget,
          .gives_ids = !args.topk_ids.empty(),
          .padding_mask = args.padding_mask,
          .hides_bans = false};
}

ChoiceLimits ChoiceLimits::of(const RouteArgs& args) {
  return {.top_k = args.top_k,
          .banned_experts = args.banned_experts,
          .expert_budget = args.expert_budget,
          .padding_mask = {}};
}

routing::Banned bans_of(const ConstTensorView& banned_experts) {
  const bool by_token = banned_experts.shape.rank() == 2;
  return {.rows = static_cast<const uint8_t*>(banned_experts.data),
          .stride = by_token ? std::max(banned_experts.row_stride, banned_experts.shape[1]) : 0};
}

void check_choice_limits(const ChoiceLimits& limits, const MoeSpec& spec, int64_t rows,
                         int64_t tokens) {
  if (!limits.any()) return;
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (limits.top_k != 0) check_number("top_k", limits.top_k, 1, spec.top_k);
  const int64_t choices = limits.top_k != 0 ? limits.top_k : spec.top_k;
  const bool looks_up = limits.gives_ids || routing::recalls_choices(spec);
  if (!limits.banned_experts.empty()) {
    check_bans(limits.banned_experts, rows, columns);
    if (!looks_up && !limits.hides_bans) check_enough_are_left(limits, choices, columns, tokens);
  }
  if (limits.expert_budget == 0) return;
  check_number("expert_budget", limits.expert_budget, std::min(choices, spec.num_experts),
               spec.num_experts);
  if (!looks_up) return;
  throw Error(
      ErrorCode::kUnsupported,
      {.what = limits.gives_ids ? "a budget chooses experts anew, and the call brings its choices"
                                : "a budget chooses experts anew, and router " + spec.router.name +
                                      " looks its choices up",
       .tensor = "expert_budget"});
}

void refuse_choice_limits(const ChoiceLimits& limits) {
  if (!limits.any()) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "a token router on CUDA knows no limits of a call",
               .tensor = limits.top_k != 0                ? "top_k"
                         : !limits.banned_experts.empty() ? "banned_experts"
                                                          : "expert_budget",
               .hint = "a layer on CUDA obeys them; or route on the CPU"});
}

}  // namespace conclave::inline v0
