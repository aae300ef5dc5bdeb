// Rounds rows of float32, bf16 or f16 to the values of codes, on the device, in one launch, by the
// rule of quant/activation_rows.h: bit for bit, except that the row of a value that is not finite
// may have other values beside NaN.
#pragma once

#include "quant/gpu_rows.h"
#include "quant/row_grid.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::experts {

// The rule of a problem's rows, as the device takes it.
struct RowRounding {
  quant::RowGrid grid;
  ActivationScale form = ActivationScale::kToken;
  RowScaleRule scale = RowScaleRule::kQuotient;
  int64_t group = 0;  // columns, for kGroup
  bool power_of_two = false;
  float largest_code = 0;
  uint32_t rounding = 0;  // added to a magnitude, for scales that are powers of two
};
RowRounding row_rounding(DType weights, const QuantSpec& quant);

struct RoundRowsCuda {
  const void* rows = nullptr;  // [num_rows, row_stride]
  DType dtype = DType::kBF16;  // kF32, kBF16 or kF16
  int64_t num_rows = 0;
  const int32_t* live_rows = nullptr;  // on the device, or null: rows from *live_rows on are
                                       // skipped
  int64_t columns = 0;
  int64_t row_stride = 0;  // elements
  RowRounding rule = {};
  const float* stated_step = nullptr;  // [1] on the device, for quant::RowFactor::kStated
  // [num_rows, value_stride]: bf16 values of codes, with the scales of groups in them, without what
  // quant::row_factor says; or float32, with everything in it. Columns from `columns` on are not
  // written. Values of float32 may replace `rows`.
  void* values = nullptr;
  DType value_dtype = DType::kBF16;
  int64_t value_stride = 0;
  float* factors = nullptr;  // [num_rows], for quant::RowFactor::kOfRow beside bf16
};

// Enqueues one launch; none if there are no rows.
void round_rows_cuda(const RoundRowsCuda& args, CUstream_st* stream);

}  // namespace conclave::inline v0::experts
