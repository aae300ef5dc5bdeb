#include "input/choice_options.h"

#include "input/ranges.h"

#include "conclave/error.h"

#include <fmt/format.h>

namespace conclave::tool {
namespace {

constexpr int64_t kMost = int64_t{1} << 20;

void check_limit(const char* option, int64_t value, int64_t high) {
  if (value <= high) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "a layer has fewer experts",
                                            .tensor = option,
                                            .found = std::to_string(value),
                                            .limit = fmt::format("1 to {}", high)});
}

}  // namespace

std::string ChoiceOptions::describe() const {
  std::string text;
  const auto add = [&](std::string part) { text += (text.empty() ? "" : ", ") + std::move(part); };
  if (top_k) add(fmt::format("top {}", *top_k));
  if (!banned.empty()) add(fmt::format("without experts {}", banned));
  if (budget) add(fmt::format("at most {} experts", *budget));
  return text;
}

void add_choice_options(Command& command, ChoiceOptions& options) {
  command.number("--top-k", "N", options.top_k, {1, kMost},
                 "Fewer experts for each token than the model has");
  command.text("--ban-experts", "LIST", options.banned,
               "Experts that no token may choose, such as 0,7-9");
  command.number("--expert-budget", "N", options.budget, {1, kMost},
                 "At most N experts for all tokens of a layer: those with the largest weights");
}

ChoiceLimitsOfLayer::ChoiceLimitsOfLayer(const ChoiceOptions& options, const MoeSpec& spec)
    : top_k_(options.top_k.value_or(0)), budget_(options.budget.value_or(0)) {
  check_limit("--top-k", top_k_, spec.top_k);
  check_limit("--expert-budget", budget_, spec.num_experts);
  if (options.banned.empty()) return;
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  banned_.resize(static_cast<size_t>(columns));
  for (const int64_t expert : parse_number_list(
           options.banned, {.option = "--ban-experts", .lowest = 0, .highest = columns - 1})) {
    banned_[static_cast<size_t>(expert)] = 1;
  }
}

void ChoiceLimitsOfLayer::apply(LayerInput& input) const {
  input.top_k = top_k_;
  input.expert_budget = budget_;
  if (banned_.empty()) return;
  input.banned_experts = {.data = banned_.data(),
                          .dtype = DType::kBool,
                          .shape = {static_cast<int64_t>(banned_.size())}};
}

}  // namespace conclave::tool
