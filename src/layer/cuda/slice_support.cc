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

}  // namespace conclave::inline v0
