#include "routing/check_router.h"

#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "routing/check_spec.h"
#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

namespace conclave::inline v0::routing {
namespace {

void check_rounding(std::string_view field, DType dtype) {
  if (is_plain(dtype)) return;
  throw Error(ErrorCode::kDType,
              {.what = "RouterSpec." + std::string(field) + " is not a rounding type",
               .expected = "F32, F16 or BF16",
               .found = std::string(to_string(dtype))});
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
  check_not_negative("input_norm.epsilon", router.input_norm.epsilon);
  check_finite("scale", router.scale);
  check_rounding("logits_dtype", router.logits_dtype);
  check_rounding("score_dtype", router.score_dtype);
}

void check_fields_of_one(const RouterSpec& router) {
  for (const RouterRow& row : router_catalog().rows()) {
    if (row.limit_own_fields != nullptr) row.limit_own_fields(router);
  }
}

void check_renormalize(const RouterSpec& router) {
  const bool p_norm = router.renormalize == Renormalize::kPNorm;
  if (p_norm && !(std::isfinite(router.renormalize_p) && router.renormalize_p > 0)) {
    refuse_field("renormalize_p", text(router.renormalize_p), "a finite number above 0");
  }
  if (!p_norm && router.renormalize_p != 1) {
    refuse_field("renormalize_p", text(router.renormalize_p), "1 but for Renormalize::kPNorm");
  }
  if (!p_norm && router.renormalize != Renormalize::kSum && router.epsilon != 0) {
    refuse_field("epsilon", text(router.epsilon),
                 "0 but for Renormalize::kSum and Renormalize::kPNorm, which divide by a norm");
  }
}

void check_groups(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  check_range("num_groups", router.num_groups, 1, spec.num_experts);
  check_range("topk_groups", router.topk_groups, 1, router.num_groups);
  if (router.num_groups == 1) return;
  if (spec.num_experts % router.num_groups != 0) {
    refuse_field("num_groups", std::to_string(router.num_groups),
                 "a divisor of the " + std::to_string(spec.num_experts) + " experts");
  }
  if (spec.num_zero_experts != 0) {
    refuse_field("num_groups", std::to_string(router.num_groups), "1 with zero experts");
  }
  const int64_t group_size = spec.num_experts / router.num_groups;
  if (router.group_score == GroupScore::kTop2Sum && group_size < 2) {
    refuse_field("num_groups", std::to_string(router.num_groups),
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
  if (spec.router.has_logit_bias) refuse_field("has_logit_bias", "true", limit);
  if (spec.router.input_norm.enabled) refuse_field("input_norm.enabled", "true", limit);
}

void refuse_fields_of_others(const RouterSpec& router, const RouterRow& own) {
  for (const RouterRow& row : router_catalog().rows()) {
    if (&row == &own || row.refuse_own_fields == nullptr) continue;
    row.refuse_own_fields(router);
  }
}

const RouterOption* find_option(const RouterRow& row, std::string_view name) {
  const auto found = std::find_if(row.options.begin(), row.options.end(),
                                  [name](const RouterOption& known) { return known.name == name; });
  return found != row.options.end() ? &*found : nullptr;
}

void check_options(const RouterSpec& router, const RouterRow* row) {
  for (const auto& [name, value] : router.options) {
    const std::string field = "options[" + name + "]";
    check_finite(field, value);
    if (row == nullptr) continue;
    const RouterOption* option = find_option(*row, name);
    if (option == nullptr) UnusedFields(router).refuse(field, text(value), "no value");
    check_between(field, value, option->low, option->high);
  }
}

void check_zero_experts(const MoeSpec& spec, const RouterTraits& traits) {
  if (traits.chooses_zero_experts || spec.num_zero_experts == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MoeSpec.num_zero_experts needs a router that can choose them",
               .expected = routers_with(&RouterTraits::chooses_zero_experts),
               .found = std::to_string(spec.num_zero_experts) + " with " + spec.router.name,
               .limit = "0"});
}

void check_shared(const MoeSpec& spec, const RouterTraits& traits) {
  if (traits.weighs_shared || !shared_facts(spec).by_router()) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "SharedMode::kRouterWeight needs a router that weighs shared experts",
               .expected = routers_with(&RouterTraits::weighs_shared),
               .found = spec.router.name});
}

}  // namespace

void check_router(const MoeSpec& spec) {
  check_ranges(spec.router);
  check_fields_of_one(spec.router);
  check_renormalize(spec.router);
  check_groups(spec);
  check_gate(spec);
  const RouterRow* row = find_router(spec.router.name);
  check_options(spec.router, row);
  if (row == nullptr) return;
  check_zero_experts(spec, row->traits);
  refuse_fields_of_others(spec.router, *row);
  row->check(spec);
  check_shared(spec, row->traits);
}

}  // namespace conclave::inline v0::routing
