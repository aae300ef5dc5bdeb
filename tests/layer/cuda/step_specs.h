// Layers whose scales and offsets a GPU holds as steps, and the same with float32 numbers.
#pragma once

#include "support/layer_fixture.h"

#include <vector>

namespace conclave::testing {

// Codes of 4 bits lie as in Q4_K, int8 as in Q6_K, or as in Q5_K if offsets are asked for.
inline MoeSpec in_steps(MoeSpec spec) {
  const bool has_offsets =
      spec.weight_dtype != DType::kI8 || spec.quant.zeros == WeightZero::kOffset;
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = has_offsets ? 32 : 16,
                .zeros = has_offsets ? WeightZero::kOffset : WeightZero::kNone};
  spec.quant.scale_values = ScaleValues::kSteps;
  if (has_offsets) spec.quant.zero_values = ScaleValues::kSteps;
  return spec;
}
inline MoeSpec bytes_with_offsets(MoeSpec spec) {
  spec.weight_dtype = DType::kI8;
  spec.quant.zeros = WeightZero::kOffset;
  return in_steps(spec);
}
inline MoeSpec in_floats(MoeSpec spec) {
  spec.quant.scale_values = spec.quant.zero_values = ScaleValues::kFloat;
  return spec;
}

// The last stage of gate and up, and that of down, has few groups.
inline std::vector<MoeSpec> step_shapes() {
  MoeSpec biased = make_spec(5, 2, 712, 328, DType::kU4);
  biased.has_bias = true;
  MoeSpec plain = make_spec(4, 2, 776, 840, DType::kI4);
  plain.activation = {.name = "relu2_no_mul"};
  return {biased, plain, make_spec(6, 3, 1032, 776, DType::kU4),
          make_spec(5, 2, 712, 840, DType::kI8), bytes_with_offsets(biased)};
}

}  // namespace conclave::testing
