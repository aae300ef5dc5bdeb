#include "routing/check_spec.h"

#include "conclave/error.h"

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace conclave::inline v0::routing {

std::string text(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

void refuse_field(std::string_view field, std::string found, std::string limit) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "RouterSpec." + std::string(field) + " is out of range",
               .found = std::move(found),
               .limit = std::move(limit)});
}

void check_range(std::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse_field(field, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

void check_between(std::string_view field, double value, double low, double high) {
  if (value >= low && value <= high) return;
  refuse_field(field, text(value), text(low) + " to " + text(high));
}

void check_finite(std::string_view field, double value) {
  if (!std::isfinite(value)) refuse_field(field, text(value), "a finite number");
}

void check_not_negative(std::string_view field, double value) {
  if (std::isfinite(value) && value >= 0) return;
  refuse_field(field, text(value), "0 or a finite positive number");
}

void UnusedFields::refuse(std::string_view field, std::string found, std::string unused) const {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "RouterSpec." + std::string(field) + " means nothing to router " +
                       std::string(rule_),
               .found = std::move(found),
               .limit = "leave it at " + std::move(unused)});
}

void refuse_choosing(const RouterSpec& router) {
  const UnusedFields unused(router);
  unused.must_be("has_selection_bias", router.has_selection_bias, {false});
  unused.must_be("num_groups", router.num_groups, {int64_t{1}});
}

void refuse_weighing(const RouterSpec& router) {
  const UnusedFields unused(router);
  unused.must_be("order", router.order, {RouterOrder::kScoreThenTopk});
  unused.must_be("soft_cap", router.soft_cap, {0.0});
  unused.must_be("epsilon", router.epsilon, {0.0});
  unused.must_be("has_expert_scale", router.has_expert_scale, {false});
  unused.must_be("score_dtype", router.score_dtype, {DType::kF32});
}

void refuse_scales(const RouterSpec& router) {
  const UnusedFields unused(router);
  unused.must_be("scale", router.scale, {1.0});
  unused.must_be("has_global_scale", router.has_global_scale, {false});
}

void refuse_all_but_softmax(const RouterSpec& router) {
  refuse_choosing(router);
  refuse_weighing(router);
  refuse_scales(router);
  const UnusedFields unused(router);
  unused.must_be("score", router.score, {RouterScore::kSoftmax});
  unused.must_be("renormalize", router.renormalize, {Renormalize::kSum, Renormalize::kNone});
}

}  // namespace conclave::inline v0::routing
