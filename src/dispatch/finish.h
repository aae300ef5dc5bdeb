// Applies the remaining terms to a token's weighted sum before its one rounding.
#pragma once

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0::dispatch {

// out[t] = round(mix[t] * (scale * sum[t] + identity_weights[t] * identity[t] + bias)
//                + shared[t] + residual[t]),
// from left to right in float32, each product and each sum rounded. Null terms are left out; the
// defaults leave out all of them. T rows each; columns are those of out.
struct FinishArgs {
  float scale = 1;
  const float* identity_weights = nullptr;  // [T]; 0 leaves the identity row unread
  ConstTensorView identity = {};            // [T, H] f32, f16 or bf16; may be out itself
  const float* bias = nullptr;              // [H]
  const float* mix = nullptr;               // [T]
  const float* shared = nullptr;            // [T, H]
  int64_t shared_stride = 0;                // elements
  const float* residual = nullptr;          // [T, H]
  int64_t residual_stride = 0;              // elements
  const uint8_t* active = nullptr;          // [T]; 0: the row is 0, whatever the other terms hold
};

// Columns [begin, begin + columns) of one token.
struct FinishTile {
  int64_t token = 0;
  int64_t begin = 0;
  int64_t columns = 0;
};

// True if `finish` adds at most shared rows, so that finish_sum need not be called.
inline bool is_plain(const FinishArgs& finish) {
  return finish.scale == 1.0F && finish.identity_weights == nullptr && finish.bias == nullptr &&
         finish.mix == nullptr && finish.residual == nullptr && finish.active == nullptr;
}

// Applies the formula of FinishArgs, without the rounding, in place to one tile's sums.
void finish_sum(const FinishArgs& finish, const FinishTile& tile, float* sum) noexcept;

}  // namespace conclave::inline v0::dispatch
