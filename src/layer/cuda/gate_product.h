// Few dot products of each row: the router's gate, the gate of shared experts.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// out[t, l] = round(sum_h x[t, h] w[l, h] + bias[l]), summed in float32 in an order that depends on
// H alone.
struct GateProduct {
  const void* rows = nullptr;  // [T, row_stride] f32, f16 or bf16
  DType dtype = DType::kBF16;
  int64_t row_stride = 0;  // elements
  int64_t num_rows = 0;
  int64_t columns = 0;            // H
  const void* weights = nullptr;  // [logits, weight_stride] f32, f16 or bf16
  DType weight_dtype = DType::kF32;
  int64_t weight_stride = 0;
  int64_t num_logits = 0;
  const float* bias = nullptr;     // [logits], or null
  DType rounded_to = DType::kF32;  // kF32, kF16 or kBF16
  float* out = nullptr;            // [T, out_stride] float32
  int64_t out_stride = 0;
};
// One launch, which overlaps with what precedes it; nothing for no rows.
void gate_product(const GateProduct& args, CUstream_st* stream);

}  // namespace conclave::inline v0
