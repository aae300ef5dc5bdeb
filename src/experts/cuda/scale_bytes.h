// Bytes of the scales of FactorForm::kExact.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::experts {

// Kernels make a number of bf16 of a byte in one instruction, and a weight of that and a code in
// another, where bytes are kNear: exponents count down from the largest of a matrix, which others
// may fall short of by 132 at most; numbers of e4m3 have another exponent, and none is 0. Other
// matrices have the bytes of their types, kAsStored, which take one or two instructions more.
enum class ByteForm : uint8_t { kNear, kAsStored };

// The byte of the largest power of a matrix, and that of the least one which numbers of e5m2 hold
// beside it, times any code of e2m1.
inline constexpr int32_t kMostNear = 254;
inline constexpr int32_t kMostNearSpan = 26;
inline constexpr int32_t kLeastNearOfE5m2 = kMostNear - kMostNearSpan;

class ScaleBytes {
 public:
  // Scales are powers of two, or of e4m3, as `values` says; those of a matrix.
  ScaleBytes(ScaleValues values, ByteForm form, std::span<const float> scales);

  // False if a scale has no byte of this form.
  bool fit() const { return fit_; }
  uint8_t of(float scale) const;
  // Sums of products are multiplied by this.
  float sum_factor() const { return sum_factor_; }
  // How far powers lie apart; 0 for others.
  int32_t span() const { return span_; }

 private:
  ScaleValues values_;
  ByteForm form_;
  int32_t largest_ = 0;  // byte
  int32_t span_ = 0;
  bool fit_ = true;
  float sum_factor_ = 1;
};

// Whether the type has the number.
bool has_scale(ScaleValues values, float scale);

}  // namespace conclave::inline v0::experts
