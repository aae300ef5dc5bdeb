#include "layer/cuda/slice_support.h"

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
  for (int32_t rank = 1; rank < ranks; ++rank) {
    const int64_t begin = tensor_slice(intermediate_size, rank, ranks).begin;
    if (quant.activations == ActivationScale::kGroup && begin % quant.activation_group != 0) {
      return Support::no(fmt::format("rank {} would begin at column {}, inside a group of {}", rank,
                                     begin, quant.activation_group));
    }
  }
  return Support::yes();
}

}  // namespace conclave::inline v0
