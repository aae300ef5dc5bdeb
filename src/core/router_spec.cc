#include "core/router_spec.h"

#include "core/router_rule.h"

#include "conclave/error.h"

#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace conclave::inline v0 {
namespace {

// Rows of a hash table: more than any vocabulary has, and the product with k stays inside 63 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 30;

// Uses the fewest digits: std::to_string would show 1e-20 as zero.
std::string text(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

[[noreturn]] void refuse(std::string_view field, std::string found, std::string limit) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "RouterSpec." + std::string(field) + " is out of range",
               .found = std::move(found),
               .limit = std::move(limit)});
}

void check_range(std::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(field, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

void check_not_negative(std::string_view field, double value) {
  if (std::isfinite(value) && value >= 0) return;
  refuse(field, text(value), "0 or a finite positive number");
}

void check_finite(std::string_view field, double value) {
  if (!std::isfinite(value)) refuse(field, text(value), "a finite number");
}

void check_rounding(std::string_view field, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) return;
  throw Error(ErrorCode::kDType,
              {.what = "RouterSpec." + std::string(field) + " is not a rounding type",
               .expected = "F32, F16 or BF16",
               .found = std::string(to_string(dtype))});
}

template <class Choice>
void check_choice(std::string_view field, Choice value, Choice last) {
  check_range(field, static_cast<int64_t>(value), 0, static_cast<int64_t>(last));
}

void check_ranges(const RouterSpec& router) {
  check_choice("score", router.score, RouterScore::kNone);
  check_choice("order", router.order, RouterOrder::kTopkThenScore);
  check_choice("group_score", router.group_score, GroupScore::kTop2Sum);
  check_choice("group_mask", router.group_mask, GroupMask::kZero);
  check_choice("renormalize", router.renormalize, Renormalize::kSoftmax);
  check_choice("epsilon_mode", router.epsilon_mode, EpsilonMode::kClampMin);
  check_not_negative("soft_cap", router.soft_cap);
  check_not_negative("epsilon", router.epsilon);
  check_not_negative("jitter_epsilon", router.jitter_epsilon);
  check_not_negative("input_norm.epsilon", router.input_norm.epsilon);
  check_finite("scale", router.scale);
  check_range("vocab_size", router.vocab_size, 0, kMaxVocab);
  check_rounding("logits_dtype", router.logits_dtype);
  check_rounding("score_dtype", router.score_dtype);
}

void check_renormalize(const RouterSpec& router) {
  const bool p_norm = router.renormalize == Renormalize::kPNorm;
  if (p_norm && !(std::isfinite(router.renormalize_p) && router.renormalize_p > 0)) {
    refuse("renormalize_p", text(router.renormalize_p), "a finite number above 0");
  }
  if (!p_norm && router.renormalize_p != 1) {
    refuse("renormalize_p", text(router.renormalize_p), "1 but for Renormalize::kPNorm");
  }
  if (!p_norm && router.renormalize != Renormalize::kSum && router.epsilon != 0) {
    refuse("epsilon", text(router.epsilon),
           "0 but for Renormalize::kSum and Renormalize::kPNorm, which divide by a norm");
  }
}

void check_groups(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  check_range("num_groups", router.num_groups, 1, spec.num_experts);
  check_range("topk_groups", router.topk_groups, 1, router.num_groups);
  if (router.num_groups == 1) return;
  if (spec.num_experts % router.num_groups != 0) {
    refuse("num_groups", std::to_string(router.num_groups),
           "a divisor of the " + std::to_string(spec.num_experts) + " experts");
  }
  if (spec.num_zero_experts != 0) {
    refuse("num_groups", std::to_string(router.num_groups), "1 with zero experts");
  }
  const int64_t group_size = spec.num_experts / router.num_groups;
  if (router.group_score == GroupScore::kTop2Sum && group_size < 2) {
    refuse("num_groups", std::to_string(router.num_groups),
           "GroupScore::kTop2Sum needs two experts in a group: at most " +
               std::to_string(spec.num_experts / 2));
  }
  if (spec.top_k > router.topk_groups * group_size) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "MoeSpec.top_k exceeds the experts of the kept groups",
                 .found = std::to_string(spec.top_k),
                 .limit = std::to_string(router.topk_groups) + " groups of " +
                          std::to_string(group_size) + " experts"});
  }
}

void check_gate(const MoeSpec& spec) {
  if (spec.has_gate) return;
  const std::string limit = "false without a gate: given logits are used as they are";
  if (spec.router.has_logit_bias) refuse("has_logit_bias", "true", limit);
  if (spec.router.input_norm.enabled) refuse("input_norm.enabled", "true", limit);
}

void check_simulated(const MoeSpec& spec) {
  const SimulatedRouting& simulated = spec.router.simulated;
  check_choice("simulated.distribution", simulated.distribution, SimulatedDistribution::kReplay);
  check_not_negative("simulated.zipf_exponent", simulated.zipf_exponent);
  const auto num_ids = static_cast<int64_t>(simulated.replay_ids.size());
  const auto num_weights = static_cast<int64_t>(simulated.replay_weights.size());
  if (simulated.distribution != SimulatedDistribution::kReplay) {
    if (num_ids != 0)
      refuse("simulated.replay_ids", std::to_string(num_ids),
             "empty but for SimulatedDistribution::kReplay");
    if (num_weights != 0) {
      refuse("simulated.replay_weights", std::to_string(num_weights),
             "empty but for SimulatedDistribution::kReplay");
    }
    return;
  }
  if (num_ids == 0 || num_ids % spec.top_k != 0) {
    refuse("simulated.replay_ids", std::to_string(num_ids) + " ids",
           "whole rows of k = " + std::to_string(spec.top_k) + ", at least one");
  }
  if (num_weights != 0 && num_weights != num_ids) {
    refuse("simulated.replay_weights", std::to_string(num_weights) + " weights",
           "none, or one for each of the " + std::to_string(num_ids) + " ids");
  }
  for (int64_t index = 0; index < num_ids; ++index) {
    const int32_t id = simulated.replay_ids[static_cast<size_t>(index)];
    if (id >= -1 && id < spec.num_experts) continue;
    refuse("simulated.replay_ids[" + std::to_string(index) + "]", std::to_string(id),
           "-1 to " + std::to_string(spec.num_experts - 1));
  }
}

// Refuses fields that a rule does not read: a value that changes nothing is a misunderstanding.
class UnusedFields {
 public:
  explicit UnusedFields(std::string_view rule) : rule_(rule) {}

  template <class Value>
  void must_be(std::string_view field, const Value& value,
               std::initializer_list<Value> allowed) const {
    for (const Value& candidate : allowed) {
      if (value == candidate) return;
    }
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "RouterSpec." + std::string(field) + " means nothing to router " +
                         std::string(rule_),
                 .found = show(value),
                 .limit = "leave it at " + show(*allowed.begin())});
  }

 private:
  static std::string show(bool value) { return value ? "true" : "false"; }
  static std::string show(double value) { return text(value); }
  static std::string show(int64_t value) { return std::to_string(value); }
  static std::string show(std::string_view value) { return std::string(value); }
  template <class Choice>
    requires std::is_enum_v<Choice>
  static std::string show(Choice value) {
    return std::to_string(static_cast<int>(value));
  }

  std::string_view rule_;
};

void refuse_own_fields_of_others(const RouterSpec& router, RouterRule rule) {
  const UnusedFields unused(router.name);
  if (rule != RouterRule::kSparseMixer) {
    unused.must_be("jitter_epsilon", router.jitter_epsilon, {0.0});
  }
  if (rule != RouterRule::kHash) unused.must_be("vocab_size", router.vocab_size, {int64_t{0}});
  if (rule == RouterRule::kSimulated) return;
  const SimulatedRouting& simulated = router.simulated;
  const bool replays = !simulated.replay_ids.empty() || !simulated.replay_weights.empty();
  unused.must_be("simulated.distribution", simulated.distribution,
                 {SimulatedDistribution::kUniform});
  unused.must_be("simulated.replay_ids", replays, {false});
}

void refuse_choosing(const RouterSpec& router) {
  const UnusedFields unused(router.name);
  unused.must_be("has_selection_bias", router.has_selection_bias, {false});
  unused.must_be("num_groups", router.num_groups, {int64_t{1}});
}

// Applies to rules that have their own formula for weights. A family's table may state what the
// formula does anyway, so a truthful `renormalize` passes.
void refuse_weighing(const RouterSpec& router) {
  const UnusedFields unused(router.name);
  unused.must_be("order", router.order, {RouterOrder::kScoreThenTopk});
  unused.must_be("soft_cap", router.soft_cap, {0.0});
  unused.must_be("epsilon", router.epsilon, {0.0});
  unused.must_be("has_expert_scale", router.has_expert_scale, {false});
  unused.must_be("score_dtype", router.score_dtype, {DType::kF32});
}

void refuse_scales(const RouterSpec& router) {
  const UnusedFields unused(router.name);
  unused.must_be("scale", router.scale, {1.0});
  unused.must_be("has_global_scale", router.has_global_scale, {false});
}

void refuse_zero_experts(const MoeSpec& spec) {
  if (spec.num_zero_experts == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MoeSpec.num_zero_experts needs a router that can choose them",
               .expected = "topk, or a router of the application",
               .found = std::to_string(spec.num_zero_experts) + " with " + spec.router.name,
               .limit = "0"});
}

void check_sparse_mixer(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  refuse_choosing(router);
  refuse_weighing(router);
  refuse_scales(router);
  const UnusedFields unused(router.name);
  unused.must_be("score", router.score, {RouterScore::kSoftmax});
  unused.must_be("renormalize", router.renormalize, {Renormalize::kSum, Renormalize::kNone});
  if (spec.top_k == 2) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MoeSpec.top_k does not fit router sparse_mixer",
               .found = std::to_string(spec.top_k),
               .limit = "2"});
}

void check_sink_softmax(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  refuse_weighing(router);
  const UnusedFields unused(router.name);
  unused.must_be("num_groups", router.num_groups, {int64_t{1}});
  unused.must_be("score", router.score, {RouterScore::kSoftmax, RouterScore::kSigmoid});
  unused.must_be("renormalize", router.renormalize,
                 {Renormalize::kSum, Renormalize::kNone, Renormalize::kSoftmax});
  if (spec.shared.mode == SharedMode::kRouterWeight) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "router sink_softmax weighs shared experts",
               .expected = "SharedMode::kRouterWeight",
               .found = "mode " + std::to_string(static_cast<int>(spec.shared.mode))});
}

void check_simulated_alone(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  refuse_choosing(router);
  refuse_weighing(router);
  refuse_scales(router);
  const UnusedFields unused(router.name);
  unused.must_be("score", router.score, {RouterScore::kSoftmax});
  unused.must_be("renormalize", router.renormalize, {Renormalize::kSum, Renormalize::kNone});
  check_simulated(spec);
}

void check_rule(const MoeSpec& spec, RouterRule rule) {
  if (rule != RouterRule::kTopk) refuse_zero_experts(spec);
  refuse_own_fields_of_others(spec.router, rule);
  switch (rule) {
    case RouterRule::kHash:
      refuse_choosing(spec.router);
      check_range("vocab_size", spec.router.vocab_size, 1, kMaxVocab);
      return;
    case RouterRule::kSparseMixer:
      return check_sparse_mixer(spec);
    case RouterRule::kSinkSoftmax:
      return check_sink_softmax(spec);
    case RouterRule::kSimulated:
      return check_simulated_alone(spec);
    case RouterRule::kTopk:
    case RouterRule::kCustom:
      return;
  }
}

}  // namespace

void validate_router(const MoeSpec& spec) {
  const RouterRule rule = router_rule(spec.router.name);
  check_ranges(spec.router);
  check_renormalize(spec.router);
  check_groups(spec);
  check_gate(spec);
  if (rule == RouterRule::kCustom) return;
  check_rule(spec, rule);
  if (spec.shared.mode == SharedMode::kRouterWeight && rule != RouterRule::kSinkSoftmax) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "SharedMode::kRouterWeight needs a router that weighs shared experts",
                 .expected = "sink_softmax, or a router of the application",
                 .found = spec.router.name});
  }
}

}  // namespace conclave::inline v0
