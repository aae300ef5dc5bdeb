// Which rows of codes the kernels of a GPU make: one answer for plans and for those who choose
// rows.
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include "conclave/format.h"

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {

Support gpu_rows_support(DType weights, const QuantSpec& quant) {
  constexpr std::string_view kHint = "with_plain_rows leaves rows as they are";
  if (quant.activation_scale_rule != RowScaleRule::kQuotient) {
    return Support::no(
        fmt::format("makes scales of rows by RowScaleRule::kQuotient only; {}", kHint));
  }
  if (quant.activation_dtype) {
    const DType usual = quant::format_of(weights).row_codes->element;
    if (*quant.activation_dtype != usual) {
      return Support::no(fmt::format("takes rows in {} beside weights of {}; found {}",
                                     to_string(usual), to_string(weights),
                                     to_string(*quant.activation_dtype)));
    }
  }
  const int64_t group = quant.activation_group;
  if (quant.activations != ActivationScale::kGroup || group == quant::kActivationGroup) {
    return Support::yes();
  }
  return Support::no(fmt::format("takes rows in groups of {} columns; found {}; {}",
                                 quant::kActivationGroup, group, kHint));
}

}  // namespace conclave::inline v0
