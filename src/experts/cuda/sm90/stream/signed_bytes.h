// Kernels of cuda.stream_codes_sm90 for codes of int8 without offsets, in sums of 32 columns: they
// take no table.
#pragma once

#include "core/weight_types.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "quant/weight_format.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// Bytes that stand for whole numbers are in the complement of two.
inline bool are_signed_bytes(const ExpertsProblem& problem) {
  return bit_size(problem.weight_dtype) == 8 &&
         quant::format_of(problem.weight_dtype).codes->whole.fit;
}

// CodeKernelForm::in_order beside 8 bits.
inline constexpr CodeKernelForm kSignedBytesForm = {.bits = 8, .in_order = true};

// Stages that shared memory has room for: of 128 columns in four groups, which have a scale and a
// zero point for each row.
constexpr int32_t signed_byte_stages(int32_t tokens, int32_t weight_rows) {
  constexpr int32_t kRoom = 217 << 10;
  constexpr int32_t kGroups = 4;
  return kRoom / (weight_rows * (128 + kGroups * 6) + tokens * 256);
}

}  // namespace conclave::inline v0::experts
