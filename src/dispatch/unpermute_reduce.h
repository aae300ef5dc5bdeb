// Brings expert output rows back into token order: weight, sum, round once.
#pragma once

#include "dispatch/finish.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0::dispatch {

struct UnpermuteArgs {
  const float* rows = nullptr;
  int64_t row_stride = 0;           // elements
  const int64_t* row_of = nullptr;  // [T, terms]: -1 contributes nothing; null: row t, one term
  const float* weights = nullptr;   // [T, terms]; null: all 1
  int64_t num_tokens = 0;
  int64_t terms = 1;
  FinishArgs finish = {};
  TensorView out = {};  // [T, H] f32, f16 or bf16; rows may be strided
};

// out[t] = round(finish(((0 + w0 * row0) + w1 * row1) + ...)), each product and each sum rounded to
// float32, in the order of the terms, and one rounding to the type of out at the end. The bits are
// the same on every machine and for any number of threads, tokens and placement of the rows.
void unpermute_reduce(const UnpermuteArgs& args, Executor& executor);

}  // namespace conclave::inline v0::dispatch
