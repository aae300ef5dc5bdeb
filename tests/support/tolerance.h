// Error bounds from formulas: they use the types' unit roundoff, the length of the sums, and
// nothing else.
#pragma once

#include "conclave/dtype.h"

#include <cmath>
#include <cstdint>

namespace conclave::testing {

// Half the distance between neighbours at 1, which is the most that one rounding to nearest loses.
inline double unit_roundoff(DType type) {
  switch (type) {
    case DType::kF64:
      return 0x1p-53;
    case DType::kF32:
      return 0x1p-24;
    case DType::kF16:
      return 0x1p-11;
    default:
      return 0x1p-8;  // bf16
  }
}

// Relative L2 error of a vector of sums of `terms` products, each product and sum rounded once to
// `accumulator`. The errors of the partial sums are independent, so the bound grows with the square
// root of the length; the factor 4 leaves room for the worst of many tokens.
inline double product_error(int64_t terms, DType accumulator) {
  return 4.0 * std::sqrt(static_cast<double>(terms)) * unit_roundoff(accumulator);
}

// Relative L2 error of one expert's output row against float64 on the same inputs and weights:
//   2 product(H) + 2 a u32  gate and up are each off by product(H); the activation by a units in
//                           the last place, each at most 2 u32
//   + product(I)            the down product
//   + 2 u_rows              if the kernel keeps activated rows in 16 bits: each element is off by
//                           u_rows at most; the factor 2 is for cancellation in the down product
//   + 2 u_rows              likewise, unless the input rows are exact in that type already
// silu's own condition number is at most 1.1 for |g| < 3, and the gate's error passes through it;
// the factor 2 on product(H) covers this.
struct MlpPrecision {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  DType accumulator = DType::kF32;
  DType rows = DType::kF32;  // for input rows and activated rows inside the kernel
  bool exact_inputs = true;  // the given input rows hold values of that type
  double activation_ulp = 4.0;
};
inline double mlp_error(const MlpPrecision& p) {
  const double in_kernel = 2.0 * product_error(p.hidden_size, p.accumulator) +
                           product_error(p.intermediate_size, p.accumulator) +
                           2.0 * p.activation_ulp * unit_roundoff(DType::kF32);
  const double stored = p.rows == DType::kF32 ? 0.0 : 2.0 * unit_roundoff(p.rows);
  return in_kernel + (p.exact_inputs ? stored : 2.0 * stored);
}

// |actual - expected| / |expected| over `count` elements, NaN-safe: a NaN on one side only counts
// as infinite. If the expected vector is zero, the absolute error is returned.
template <class Actual>
double relative_l2(const Actual* actual, const double* expected, int64_t count) {
  double error = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double difference = static_cast<double>(actual[i]) - expected[i];
    error += difference * difference;
    norm += expected[i] * expected[i];
  }
  if (!std::isfinite(error)) return HUGE_VAL;
  return norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace conclave::testing
