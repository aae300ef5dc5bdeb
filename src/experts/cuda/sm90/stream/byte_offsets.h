// Kernels of cuda.stream_codes_sm90 for codes of int8 with offsets: they take no table, and offsets
// multiply sums of rows that are made once a stage.
#pragma once

#include "experts/cuda/sm90/stream/stream_codes.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// CodeKernelForm::in_order beside 8 bits.
constexpr CodeKernelForm byte_offsets_form(bool steps) {
  return {.bits = 8, .offsets = true, .in_order = true, .steps = steps};
}
constexpr bool is_byte_offsets(const CodeKernelForm& form) {
  return form == byte_offsets_form(form.steps);
}

// Stages that shared memory has room for: of 128 columns in four groups, whose sums have four
// numbers of bf16 for each token.
constexpr int32_t byte_offset_stages(bool steps, int32_t tokens, int32_t weight_rows) {
  constexpr int32_t kRoom = 217 << 10;
  constexpr int32_t kGroups = 4;
  const int32_t factors = steps ? kGroups * 2 + 8 : kGroups * 8;
  return kRoom / (weight_rows * (128 + factors) + tokens * (256 + kGroups * 8));
}

}  // namespace conclave::inline v0::experts
