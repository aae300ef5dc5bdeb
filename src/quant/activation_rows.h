// How rows of activations become codes, by one rule for every device and format.
#pragma once

#include "quant/weight_format.h"

#include "conclave/spec.h"

#include <cstdint>
#include <limits>
#include <string>

namespace conclave::inline v0::quant {

// Columns that share a scale under ActivationScale::kGroup unless a QuantSpec says otherwise; the
// last group may have fewer. Kernels of a GPU know no other.
inline constexpr int64_t kActivationGroup = 128;

struct ActivationRule {
  ActivationScale form = ActivationScale::kNone;
  // For kGroup.
  int64_t group = kActivationGroup;
  RowScaleRule scale = RowScaleRule::kQuotient;
  bool power_of_two_scales = false;
  float static_scale = 1;  // for kTensorStatic, and t of RowScaleRule::kTwoLevel
  const CodeBook* codes = nullptr;
  // Products of codes are whole numbers, and float32 holds the sum of this many exactly: where a
  // partial sum of products ends at the latest. None otherwise.
  int64_t exact_columns = kNoLimit;

  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  bool is_exact() const { return exact_columns != kNoLimit; }
  // Whether a small change of the largest magnitude may change a scale by much.
  bool has_sparse_scales() const { return power_of_two_scales || scale != RowScaleRule::kQuotient; }
};
// The rule for rows that are multiplied with weights of this type; plain ones have none.
ActivationRule activation_rule(DType weights, const QuantSpec& quant);

// The codes that rows may have: int8, e4m3, and other floats of 4 to 8 bits; null for other types.
const CodeBook* find_row_codes(DType element) noexcept;
// Their types with a scale rule but RowScaleRule::kQuotient, for messages.
std::string float_row_types();

// Whether int8 rows go beside weights of this type, which are codes.
bool takes_int8_rows(DType weights);
// Whether rows of this type with scales by RowScaleRule::kQuotient go beside weights of codes: the
// usual ones do, e4m3 beside any, and int8 beside whole numbers.
bool takes_quotient_rows(DType weights, DType rows);

// The units that power_step of code_quotient.h adds to a magnitude for the rule's powers of two.
uint32_t power_rounding(const ActivationRule& rule);

// The largest magnitude that codes and scales reach, over the step that a checkpoint states.
float largest_over_step(const ActivationRule& rule);

// Scales per row: 1, or one per group; 0 for kNone, which leaves rows unchanged.
int64_t scales_per_row(const ActivationRule& rule, int64_t columns);
int64_t scales_per_row(ActivationScale form, int64_t columns);  // in groups of kActivationGroup
// Columns that share a scale: those of a group, or all.
int64_t scale_width(const ActivationRule& rule, int64_t columns);
int64_t scale_width(ActivationScale form, int64_t columns);

// The code of value / scale, divided in float32 and rounded to nearest even; a quotient beyond the
// largest code becomes that one. A value that is not finite becomes NaN, if there is such a code.
uint8_t activation_code(const CodeBook& codes, float value, float scale);

// The scale of `count` values that share one; NaN if one of them is not finite and no code says so.
// The form must not be kNone.
float scale_of(const float* values, int64_t count, const ActivationRule& rule);

// Turns values [columns] into codes [columns] and scales [scales_per_row]. The form must not be
// kNone.
void quantize_activations(const float* values, int64_t columns, const ActivationRule& rule,
                          uint8_t* codes, float* scales);

// Does the same with the codes' values in the place of `values`, for kernels that multiply those.
void round_to_activation_codes(float* values, int64_t columns, const ActivationRule& rule,
                               float* scales);

}  // namespace conclave::inline v0::quant
