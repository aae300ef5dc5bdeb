// In which types a layer reads the blocks of a GGUF file.
#pragma once

#include "checkpoint/gguf/layer_tensors.h"

#include "conclave/spec.h"

namespace conclave::inline v0::checkpoint {

// Gate, up and down of a layer may have types of their own, as those of "Q4_K_M" files have. A
// layer has one type, so that blocks come apart into codes of one width with scales for groups of
// one size, and with offsets if any of them has some; what gate and up, or down, have less of is
// said beside it. Tensors of plain types keep theirs if they agree.
struct GgufForm {
  DType routed = DType::kF32;
  DType shared = DType::kF32;
  DType residual = DType::kF32;
  QuantSpec quant = {};  // holds for routed and shared experts whose type is one of codes
};
GgufForm form_of(const GgufLayer& layer);

}  // namespace conclave::inline v0::checkpoint
