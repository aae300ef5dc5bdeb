#include "layer/cuda/slice_support.h"

#include "quant/activation_rows.h"

#include "conclave/placement.h"

#include <fmt/format.h>

namespace conclave::inline v0 {

Support tensor_slices_support(const QuantSpec& quant, int64_t intermediate_size, int32_t ranks) {
  if (ranks == 1) return Support::yes();
  if (quant.activations == ActivationScale::kToken) {
    return Support::no(
        "activated rows have one scale each, made of all their columns; tensor-parallel ranks hold "
        "some of them");
  }
  const bool in_blocks = quant.weights == WeightScale::kBlock;
  for (int32_t rank = 1; rank < ranks; ++rank) {
    const int64_t begin = tensor_slice(intermediate_size, rank, ranks).begin;
    const auto cuts = [begin](int64_t size) { return begin % size != 0; };
    if (in_blocks && (cuts(quant.block_rows) || cuts(quant.block_cols))) {
      return Support::no(fmt::format("rank {} would begin at column {}, inside a block of {}x{}",
                                     rank, begin, quant.block_rows, quant.block_cols));
    }
    if (quant.activations == ActivationScale::kGroup && cuts(quant::kActivationGroup)) {
      return Support::no(fmt::format("rank {} would begin at column {}, inside a group of {}", rank,
                                     begin, quant::kActivationGroup));
    }
  }
  return Support::yes();
}

Support coded_rows_support(DType weights, const QuantSpec& quant) {
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
