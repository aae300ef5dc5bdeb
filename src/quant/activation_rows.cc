#include "quant/activation_rows.h"

#include "core/checked.h"
#include "core/float8.h"
#include "quant/code_quotient.h"
#include "quant/code_rows.h"
#include "quant/formats.h"
#include "quant/row_grid.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

namespace conclave::inline v0::quant {
namespace {

// NaN is skipped: its own code is NaN, which is enough.
float largest_magnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
  return largest;
}

// Writes a row's scales and calls body(column, scale) for each column, after the scale of its
// group.
template <class Body>
void for_each_column(const float* values, int64_t columns, const ActivationRule& rule,
                     float* scales, const Body& body) {
  const int64_t width = scale_width(rule, columns);
  for (int64_t begin = 0; begin < columns; begin += width) {
    const int64_t end = std::min(columns, begin + width);
    const float scale = scale_of(values + begin, end - begin, rule);
    *scales++ = scale;
    for (int64_t column = begin; column < end; ++column) body(column, scale);
  }
}

// A power of two, so that few groups are cut. Kernels that add whole numbers make integers of rows,
// so that floats are none, whatever their values.
int64_t exact_columns(const CodeBook& weights, const CodeBook& rows) {
  if (!weights.whole.fit || !rows.whole.fit || rows.mantissa_bits) return ActivationRule::kNoLimit;
  const auto largest = static_cast<uint64_t>(weights.whole.magnitude() * rows.whole.magnitude());
  return static_cast<int64_t>(std::bit_floor((uint64_t{1} << 24) / largest));
}

struct RowCodes {
  const CodeBook* codes;
  bool are_usual;  // rows become these beside weights of the same format
};

template <class Format>
constexpr RowCodes matrix_and_rows() {
  return {.codes = &kCodeBook<Format>, .are_usual = std::is_same_v<typename Format::Rows, Format>};
}

template <class... Matrix, class... Row>
constexpr auto list_row_codes(FormatList<Matrix...>, FormatList<Row...>) {
  return std::array{matrix_and_rows<Matrix>()..., RowCodes{&kCodeBook<Row>, false}...};
}
constexpr auto kCodes = list_row_codes(CodedFormats{}, RowFormats{});

const RowCodes* find_listed(DType element) {
  const auto* const found = std::ranges::find_if(
      kCodes, [element](const RowCodes& row) { return row.codes->element == element; });
  return found == kCodes.end() ? nullptr : found;
}

bool is_whole_beside(const CodeBook& weights, const CodeBook& rows) {
  return exact_columns(weights, rows) != ActivationRule::kNoLimit;
}

float dynamic_step(float amax, const ActivationRule& rule) {
  const float largest = rule.codes->largest;
  switch (rule.scale) {
    case RowScaleRule::kQuotient:
      return step_of(amax, largest, rule.power_of_two_scales);
    case RowScaleRule::kTwoLevel:
      return two_level_step(amax, largest, rule.static_scale);
    default:
      return power_step(amax, largest, power_rounding(rule));
  }
}

// Floats have values of the same magnitudes on both sides.
void round_to_grid(float* values, int64_t count, const RowGrid& grid, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    const float quotient = values[i] / scale;
    const uint32_t sign = std::bit_cast<uint32_t>(quotient) & 0x80000000U;
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(quotient) ^ sign);
    const float nearest = grid.nearest(magnitude, grid.largest);
    values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) | sign);
  }
}

// The bits of the largest magnitude; those of infinity and NaN are above all others.
int32_t largest_bits(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = std::bit_cast<int32_t>(values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

bool is_finite_step(float scale) { return scale > 0 && scale <= std::numeric_limits<float>::max(); }

}  // namespace

const CodeBook* find_row_codes(DType element) noexcept {
  const RowCodes* const listed = find_listed(element);
  if (listed == nullptr) return nullptr;
  return listed->are_usual || listed->codes->mantissa_bits ? listed->codes : nullptr;
}

std::string float_row_types() {
  std::string text;
  for (const RowCodes& row : kCodes) {
    if (!row.codes->mantissa_bits) continue;
    if (!text.empty()) text += ", ";
    text += to_string(row.codes->element);
  }
  return text;
}

float largest_over_step(const ActivationRule& rule) {
  const float largest = rule.codes->largest;
  return rule.scale == RowScaleRule::kTwoLevel ? largest * kLargestE4m3 : largest;
}

uint32_t power_rounding(const ActivationRule& rule) {
  switch (rule.scale) {
    case RowScaleRule::kEvenPower:
      return mantissa_rounding(*rule.codes->mantissa_bits);
    case RowScaleRule::kHalfPower:
      return mantissa_rounding(1);
    case RowScaleRule::kCeilPower:
      return kRoundUp;
    default:
      return 0;
  }
}

int64_t scale_width(const ActivationRule& rule, int64_t columns) {
  return rule.form == ActivationScale::kGroup ? std::min(rule.group, columns) : columns;
}
int64_t scale_width(ActivationScale form, int64_t columns) {
  return scale_width(ActivationRule{.form = form}, columns);
}

int64_t scales_per_row(const ActivationRule& rule, int64_t columns) {
  if (rule.form == ActivationScale::kNone) return 0;
  return rule.form == ActivationScale::kGroup ? ceil_div(columns, rule.group) : 1;
}
int64_t scales_per_row(ActivationScale form, int64_t columns) {
  return scales_per_row(ActivationRule{.form = form}, columns);
}

ActivationRule activation_rule(DType weights, const QuantSpec& quant) {
  const WeightFormat& format = format_of(weights);
  if (format.codes == nullptr) return {};
  const CodeBook* const row_codes =
      quant.activation_dtype ? find_row_codes(*quant.activation_dtype) : format.row_codes;
  return {.form = quant.activations,
          .group = quant.activation_group,
          .scale = quant.activation_scale_rule,
          .power_of_two_scales = quant.power_of_two_scales,
          .codes = row_codes,
          .exact_columns = exact_columns(*format.codes, *row_codes)};
}

bool takes_int8_rows(DType weights) {
  return is_whole_beside(*format_of(weights).codes, *format_of(DType::kI8).codes);
}

bool takes_quotient_rows(DType weights, DType rows) {
  const RowCodes* const listed = find_listed(rows);
  if (listed == nullptr || !listed->are_usual) return false;
  return listed->codes->mantissa_bits || is_whole_beside(*format_of(weights).codes, *listed->codes);
}

uint8_t activation_code(const CodeBook& codes, float value, float scale) {
  if (!std::isfinite(value)) {
    // Without a code for NaN the scale says it, and what is multiplied with it does not matter.
    return codes.has_nan ? codes.encode(value) : codes.encode(0.0F);
  }
  const float quotient = value / scale;
  // A quotient is infinite only here, for a finite value over a tiny step.
  constexpr float kMost = std::numeric_limits<float>::max();
  return codes.encode(std::isinf(quotient) ? std::copysign(kMost, quotient) : quotient);
}

float scale_of(const float* values, int64_t count, const ActivationRule& rule) {
  const auto is_finite = [](float value) { return std::isfinite(value); };
  if (!rule.codes->has_nan && !std::all_of(values, values + count, is_finite)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  if (rule.form == ActivationScale::kTensorStatic) return rule.static_scale;
  return dynamic_step(largest_magnitude(values, count), rule);
}

void quantize_activations(const float* values, int64_t columns, const ActivationRule& rule,
                          uint8_t* codes, float* scales) {
  for_each_column(values, columns, rule, scales, [&](int64_t column, float scale) {
    codes[column] = activation_code(*rule.codes, values[column], scale);
  });
}

void round_to_activation_codes(float* values, int64_t columns, const ActivationRule& rule,
                               float* scales) {
  const auto by_codes = [&](int64_t column, float scale) {
    values[column] = rule.codes->decode(activation_code(*rule.codes, values[column], scale));
  };
  if (!rule.codes->mantissa_bits) return for_each_column(values, columns, rule, scales, by_codes);
  const RowGrid grid = RowGrid::of(*rule.codes);
  const int64_t width = scale_width(rule, columns);
  for (int64_t begin = 0; begin < columns; begin += width) {
    const int64_t count = std::min(width, columns - begin);
    float* const group = values + begin;
    const int32_t largest = largest_bits(group, count);
    const bool finite = largest < std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
    const float scale = !finite ? scale_of(group, count, rule)
                        : rule.form == ActivationScale::kTensorStatic
                            ? rule.static_scale
                            : dynamic_step(std::bit_cast<float>(largest), rule);
    *scales++ = scale;
    if (finite && is_finite_step(scale)) {
      round_to_grid(group, count, grid, scale);
    } else {
      for (int64_t i = begin; i < begin + count; ++i) by_codes(i, scale);
    }
  }
}

}  // namespace conclave::inline v0::quant
