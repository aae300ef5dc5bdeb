#include "quant/gpu_rows.h"

#include "quant/weight_format.h"

#include "conclave/format.h"

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {
namespace quant {

Support code_rows_support(DType weights, const QuantSpec& quant) {
  if (quant.activations == ActivationScale::kNone) return Support::yes();
  if (quant.activation_scale_rule != RowScaleRule::kQuotient) {
    return Support::no("takes codes of rows with scales by RowScaleRule::kQuotient");
  }
  const CodeBook& usual = *format_of(weights).row_codes;
  if (quant.activation_dtype && *quant.activation_dtype != usual.element) {
    return Support::no(fmt::format("takes rows in {} beside weights of {}; found {}",
                                   to_string(usual.element), to_string(weights),
                                   to_string(*quant.activation_dtype)));
  }
  if (quant.activations == ActivationScale::kTensorStatic && !usual.has_nan) {
    return Support::no(
        fmt::format("rows in {} with one step for all have nothing to say that a value is not "
                    "finite",
                    to_string(usual.element)));
  }
  const int64_t group = quant.activation_group;
  if (quant.activations != ActivationScale::kGroup || group == kActivationGroup) {
    return Support::yes();
  }
  return Support::no(
      fmt::format("takes rows in groups of {} columns; found {}", kActivationGroup, group));
}

Support value_rows_support(DType weights, const QuantSpec& quant) {
  const ActivationRule rule = activation_rule(weights, quant);
  if (rule.form == ActivationScale::kNone) return Support::yes();
  if (!rule.codes->exact_in_bf16) return Support::no("takes rows whose codes bf16 holds");
  const bool has_few_bits = rule.power_of_two_scales || rule.scale != RowScaleRule::kQuotient;
  if (rule.form != ActivationScale::kGroup || has_few_bits) return Support::yes();
  return Support::no("takes scales of groups of a row's columns that are powers of two");
}

RowFactor row_factor(const QuantSpec& quant) {
  switch (quant.activations) {
    case ActivationScale::kToken:
      return RowFactor::kOfRow;
    case ActivationScale::kTensorStatic:
      return RowFactor::kStated;
    default:
      return quant.activation_scale_rule == RowScaleRule::kTwoLevel ? RowFactor::kStated
                                                                    : RowFactor::kNone;
  }
}

}  // namespace quant

Support gpu_rows_support(DType weights, const QuantSpec& quant) {
  const Support codes = quant::code_rows_support(weights, quant);
  if (codes || quant::value_rows_support(weights, quant)) return Support::yes();
  return Support::no(codes.reason() + "; with_plain_rows leaves rows as they are");
}

}  // namespace conclave::inline v0
