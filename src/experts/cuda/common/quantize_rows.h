// Quantises rows of float32, bf16 or f16 to codes and scales, on the device, in one launch.
//
// The rule equals quant/activation_rows.h bit for bit. For e4m3, a row or a group of 128 columns, s
// = max|x| / 448, or 1 if that is 0; power_of_two rounds s up to a power of two, at least 2^-126. A
// code is x / s, a float32 division, rounded to nearest even and saturated at 448. NaN has code
// 0x7F and does not count for the largest magnitude; with an infinity s is infinite, and the
// infinity's code is 0x7F. With a static step, every x that is not finite has code 0x7F. Codes of
// int8 have s = max|x| / 127, and s is NaN where a value of the row is not finite.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::experts {

struct QuantizeRowsCuda {
  const void* rows = nullptr;  // [num_rows, row_stride]
  DType dtype = DType::kBF16;  // kF32, kBF16 or kF16
  int64_t num_rows = 0;
  const int32_t* live_rows = nullptr;  // on the device, or null: rows from *live_rows on are
                                       // skipped
  int64_t columns = 0;
  int64_t row_stride = 0;  // elements
  // The launch before this one has waited for the rows, so they may be read before it has ended.
  bool rows_are_ready = false;
  ActivationScale activations = ActivationScale::kGroup;  // kGroup, kToken or kTensorStatic
  bool power_of_two = false;                              // for dynamic scales
  const float* static_scale = nullptr;                    // [1] on the device, for kTensorStatic
  DType code_dtype = DType::kF8E4M3;                      // what a format has as row_codes
  uint8_t* codes = nullptr;                               // [num_rows, code_stride]
  int64_t code_stride = 0;  // columns from `columns` on are not written
  // The codes of each 32 columns lie as `lane_byte` says, beside weights in CodeOrder::
  // kLanesOfFloats. For codes of e4m3 and multiples of 32 columns.
  bool in_lanes = false;
  // The scale of row r and group g lies at r * scale_stride + g * group_stride; a row has 1 or
  // ceil(columns / 128) groups. Not written for kTensorStatic.
  float* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t group_stride = 1;
  // [num_rows, top_k], or null: the target rows that each row's codes and scales are written to;
  // negative ones are skipped.
  const int32_t* slot_row = nullptr;
  int32_t top_k = 1;
};

// Enqueues one launch, which overlaps with what precedes it; none if there are no rows.
void quantize_rows_cuda(const QuantizeRowsCuda& args, CUstream_st* stream);
// Does the same for every type of codes, as plainly as it can be written.
void quantize_rows_plain(const QuantizeRowsCuda& args, CUstream_st* stream);

}  // namespace conclave::inline v0::experts
