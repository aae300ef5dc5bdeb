// Makes random tensors on the device, so that weights of tens of gigabytes are never uploaded.
#pragma once

#include "core/device_flow.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::testing {

// [rows, stride] of `dtype` (kF32, kBF16, kF16, kF8E4M3): columns below `cols` are normal with the
// given deviation, those beyond are NaN.
struct NormalMatrix {
  void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  float deviation = 1;
  uint64_t seed = 1;
};
void fill_normal(const NormalMatrix& matrix, CUstream_st* stream);

// Writes base * 2^u, with u uniform in [-1/2, 1/2].
void fill_scales(float* scales, int64_t count, float base, uint64_t seed, CUstream_st* stream);

// Turns kBF16 or kF16 rows into e4m3 codes and scales, by the rule that `quant` names; for
// kTensorStatic the step is read from `static_step`. Writes `codes.data` and `codes.scales`.
struct QuantizeArgs {
  DeviceRows rows;
  int64_t cols = 0;
  DeviceRows codes;
  QuantSpec quant;
  const float* static_step = nullptr;
};
void quantize_rows(const QuantizeArgs& args, CUstream_st* stream);

// Row r of `to` becomes row row_slot[r] / top_k of `from`, for r below *num_rows. With
// group_stride, rows are float32 scales, and number g of row r goes to r + g * group_stride.
struct GatherArgs {
  const void* from = nullptr;
  int64_t row_bytes = 0;
  int64_t group_stride = 0;
  const int32_t* row_slot = nullptr;
  const int32_t* num_rows = nullptr;  // on the device
  int64_t max_rows = 0;
  int32_t top_k = 1;
  void* to = nullptr;
};
void gather_rows(const GatherArgs& args, CUstream_st* stream);

}  // namespace conclave::testing
