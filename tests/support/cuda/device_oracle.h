// Expert MLPs in float64 on the device, from the stored codes and scales: what kernels are held to.
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
// Of e4m3 activations: an intermediate value whose quotient lies as near the middle between two
// codes as the arithmetic errs may become either of them; they are 6 to 12 % apart. The row's
// allowance is the root of the summed squares of what such values move it by (columns of the down
// matrix are nearly orthogonal). `excess` is the error beyond that: what the tolerance is for.
struct RowErrors {
  double worst = 0;
  double excess = 0;  // the worst of error - allowance; without e4m3 activations, `worst`
  double median = 0;
  double p999 = 0;              // 99.9 % of the checked rows are at most this far off
  double aggregate = 0;         // of all checked rows taken as one vector
  double aggregate_excess = 0;  // the same beyond its own allowance
  double ambiguous_rows = 0;    // share of rows with an allowance
  int64_t worst_row = -1;
  int64_t checked = 0;
  int64_t stray = 0;  // elements written outside what the call may write
  std::string describe() const;
};
// How far the quotient of an intermediate value and its scale may be off, relatively:
// docs/numerics.md. Tensor cores align e4m3 products to 14 bits: a product row errs by some 5e-4,
// gate and up both reach the value, and the largest value of the group reaches the scale.
inline constexpr double kTensorCoreAmbiguity = 2e-3;
// Likewise with products summed in float32, rows of up to 8192.
inline constexpr double kFloat32Ambiguity = 3e-5;
// No stray write; every checked row within `tolerance` beyond its allowance, and the whole
// likewise; the whole of 2000 rows or more without any allowance.
bool within(const RowErrors& errors, double tolerance);

struct OracleProblem {
  experts::DeviceExpertsProblem sizes;
  experts::DeviceExperts weights;
  DeviceRows input;
  const float* input_weights = nullptr;     // per slot on the device, or null
  double ambiguity = kTensorCoreAmbiguity;  // of e4m3 activations
};

// Rows of one slot each: which input row goes through which expert. Slots with expert -1 give
// zeros.
struct OracleSlot {
  int64_t slot = 0;
  int32_t token = 0;
  int32_t expert = -1;
};

// Output tensor of the code under test, on the device, poisoned with 0xff before the call.
struct OutputRows {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  DType dtype = DType::kBF16;
};

// Row slot of `output` against the oracle's row of each of `slots`.
RowErrors compare_slots(const OracleProblem& problem, std::span<const OracleSlot> slots,
                        const OutputRows& output);

// Row token of `output` against scale * sum over its `top_k` slots of weight * row. `slots` holds
// top_k neighbours a token, `slot_weights` a weight for each.
struct TokenSum {
  std::span<const OracleSlot> slots;
  std::span<const float> slot_weights;
  int64_t top_k = 1;
  double scale = 1;
};
RowErrors compare_tokens(const OracleProblem& problem, const TokenSum& sum,
                         const OutputRows& output);

// Elements that are no longer poison though they may not be written: all of a row where
// may_write[row] is 0, the columns from `cols` on elsewhere.
int64_t count_stray(const OutputRows& output, std::span<const uint8_t> may_write);

}  // namespace conclave::testing
