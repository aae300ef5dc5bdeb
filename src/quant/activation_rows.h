// How rows of activations become e4m3 codes, by one rule for every device.
#pragma once

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0::quant {

// Columns that share a scale under ActivationScale::kGroup; the last group may have fewer.
inline constexpr int64_t kActivationGroup = 128;

struct ActivationRule {
  ActivationScale form = ActivationScale::kNone;
  bool power_of_two_scales = false;
  float static_scale = 1;  // for kTensorStatic
};

// Scales per row: 1, or one per group; 0 for kNone, which leaves rows unchanged.
int64_t scales_per_row(ActivationScale form, int64_t columns);
// Columns that share a scale: 128, or all.
int64_t scale_width(ActivationScale form, int64_t columns);

// The step for a row or group whose largest magnitude is `amax`, NaN ignored: amax / 448 in
// float32, or 1 if that is 0; infinity stays. `power_of_two` rounds up to a normal power of two.
float dynamic_scale(float amax, bool power_of_two);

// The code of value / scale, divided in float32 and rounded to nearest even; a quotient beyond 448
// becomes 448. A value that is not finite becomes NaN.
uint8_t activation_code(float value, float scale);

// The scale of `count` values that share one. The form must not be kNone.
float scale_of(const float* values, int64_t count, const ActivationRule& rule);

// Turns values [columns] into codes [columns] and scales [scales_per_row]. The form must not be
// kNone.
void quantize_activations(const float* values, int64_t columns, const ActivationRule& rule,
                          uint8_t* codes, float* scales);

// Does the same with the codes' values in the place of `values`, for kernels that multiply those.
void round_to_activation_codes(float* values, int64_t columns, const ActivationRule& rule,
                               float* scales);

}  // namespace conclave::inline v0::quant
