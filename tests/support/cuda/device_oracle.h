// Expert MLPs in float64 on the device, from the stored codes and scales: the reference for
// kernels.
#pragma once

#include "activation/activations.h"
#include "core/device_flow.h"
#include "experts/cuda/device_experts.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {

// Relative L2 errors of rows. A NaN or infinity on one side only counts as infinite.
//
// With e4m3 activations, an intermediate value whose quotient lies within the arithmetic's error of
// the middle between two codes may become either of them; they are 6 to 12 % apart. A row's
// allowance is the root of the summed squares of how far such values shift it (columns of down are
// nearly orthogonal). `excess` is the error beyond it, to which the tolerance applies.
struct RowErrors {
  double worst = 0;
  double excess = 0;  // the worst of error - allowance; without e4m3 activations, `worst`
  double median = 0;
  double p999 = 0;              // 99.9 % of the checked rows are off by at most this much
  double aggregate = 0;         // over all checked rows taken as one vector
  double aggregate_excess = 0;  // the same, beyond its own allowance
  double ambiguous_rows = 0;    // share of rows with an allowance
  int64_t worst_row = -1;
  int64_t checked = 0;
  int64_t stray = 0;  // elements written that the call must not write
  std::string describe() const;
};
// The relative error that the quotient of an intermediate value and its scale may have
// (docs/numerics.md). Tensor cores align e4m3 products to 14 bits: a product row is off by some
// 5e-4, gate and up both enter the value, and the largest value of the group enters the scale.
inline constexpr double kTensorCoreAmbiguity = 2e-3;
// The same for products summed in float32, with rows of up to 8192.
inline constexpr double kFloat32Ambiguity = 3e-5;
// Whether there is no stray write, and each checked row and all rows together are within
// `tolerance` beyond their allowance; 2000 rows or more together get no allowance.
bool within(const RowErrors& errors, double tolerance);

struct OracleProblem {
  experts::ExpertsProblem sizes;
  experts::DeviceExperts weights;
  DeviceRows input;
  const float* input_weights = nullptr;     // per slot on the device, or null
  double ambiguity = kTensorCoreAmbiguity;  // for e4m3 activations
};

// One row per slot: which input row goes through which expert. Slots with expert -1 give zeros.
struct OracleSlot {
  int64_t slot = 0;
  int32_t token = 0;
  int32_t expert = -1;
};

// The output tensor of the code under test, on the device, poisoned with 0xff before the call.
struct OutputRows {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  DType dtype = DType::kBF16;
};

// Compares row `slot` of `output` with the oracle's row, for each of `slots`.
RowErrors compare_slots(const OracleProblem& problem, std::span<const OracleSlot> slots,
                        const OutputRows& output);

// Compares row `token` of `output` with scale * sum over its `top_k` slots of weight * row. `slots`
// holds top_k neighbours per token, `slot_weights` one weight each.
struct TokenSum {
  std::span<const OracleSlot> slots;
  std::span<const float> slot_weights;
  int64_t top_k = 1;
  double scale = 1;
};
RowErrors compare_tokens(const OracleProblem& problem, const TokenSum& sum,
                         const OutputRows& output);

// Counts elements that are no longer poison although they must not be written: the whole row if
// may_write[row] is 0, otherwise the columns from `cols` on.
int64_t count_stray(const OutputRows& output, std::span<const uint8_t> may_write);

}  // namespace conclave::testing
