#include "quant/gguf/two_levels.h"

#include "core/float_convert.h"
#include "quant/gguf/block_bytes.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::quant {
namespace {

// More rounds win less than a thousandth of the error.
constexpr int kRounds = 3;
// Ends of the codes' range, in tenths of a code, that are tried for a group.
constexpr int kFirstEnd = -10;
constexpr int kLastEnd = 10;

// A group's scale and offset before they are rounded.
struct Line {
  float scale = 0;
  float offset = 0;
};

float as_f16(float value) { return f16_to_float(float_to_f16(within_f16(value))); }

// The nearest whole number within a range from -128 or more on; the least for NaN, which infinity
// times a step without an inverse gives.
int whole_within(float value, int least, int largest) {
  const float bounded =
      std::min(std::max(static_cast<float>(least), value), static_cast<float>(largest));
  constexpr float kShift = 128;
  return static_cast<int>(bounded + (kShift + 0.5F)) - static_cast<int>(kShift);
}

int code_of(const TwoLevelForm& form, float value, float inverse, float offset) {
  return whole_within((value + offset) * inverse, form.least_code, form.largest_code);
}

double error_of(const TwoLevelForm& form, const float* values, Line line) {
  const float inverse = inverse_of(line.scale);
  double sum = 0;
  for (int64_t i = 0; i < form.group; ++i) {
    const auto code = static_cast<float>(code_of(form, values[i], inverse, line.offset));
    const double off = values[i] - (line.scale * code - line.offset);
    sum += off * off;
  }
  return sum;
}

// Sums over pairs of a code's multiple x, a constant 1 and a value v.
struct Moments {
  double xx = 0;
  double x1 = 0;
  double n = 0;
  double xv = 0;
  double v1 = 0;

  void add(double x, double one, double v) {
    xx += x * x;
    x1 += x * one;
    n += one * one;
    xv += x * v;
    v1 += one * v;
  }
  // scale * x - offset * 1 of least squares, an offset below 0 becoming 0. False if any would do.
  bool solve(bool has_offset, Line& line) const {
    const double determinant = xx * n - x1 * x1;
    if (has_offset && determinant > 1e-9 * xx * n) {
      const double offset = (x1 * xv - xx * v1) / determinant;
      if (offset > 0) {
        line = {static_cast<float>((n * xv - x1 * v1) / determinant), static_cast<float>(offset)};
        return true;
      }
    }
    if (xx == 0) return false;
    line = {static_cast<float>(xv / xx), 0};
    return true;
  }
};

// The outermost value with its sign where there are no offsets, else the range that begins at 0 or
// below.
Line spread_group(const TwoLevelForm& form, const float* values, float share) {
  const auto [least, largest] = std::minmax_element(values, values + form.group);
  if (form.has_offsets()) {
    const float begin = std::min(*least, 0.0F);
    const float range = std::max(*largest * share - begin * share, 0.0F);
    return {range / static_cast<float>(form.largest_code), -begin * share};
  }
  const float outermost = -*least >= *largest ? *least : *largest;
  return {outermost * share / static_cast<float>(form.least_code), 0};
}

// The line of least squares among those through codes of several ranges.
Line fit_group(const TwoLevelForm& form, const float* values) {
  const Line whole = spread_group(form, values, 1);
  Line best = whole;
  double least = error_of(form, values, whole);
  const auto width = static_cast<float>(form.largest_code - form.least_code);
  for (int end = kFirstEnd; end <= kLastEnd; ++end) {
    const float share = width / (width + 0.1F * static_cast<float>(end));
    const float inverse = inverse_of(whole.scale * share);
    Moments moments;
    for (int64_t i = 0; i < form.group; ++i) {
      moments.add(code_of(form, values[i], inverse, whole.offset), 1, values[i]);
    }
    Line line;
    if (!moments.solve(form.has_offsets(), line)) continue;
    const double error = error_of(form, values, line);
    if (!(error < least)) continue;
    least = error;
    best = line;
  }
  return best;
}

class BlockFit {
 public:
  BlockFit(const TwoLevelForm& form, const float* values) : form_(form), values_(values) {}

  // The float16 numbers give the largest integers to the largest lines.
  void set_numbers(const std::array<Line, kMaxBlockGroups>& lines) {
    float scale = 0;
    float offset = 0;
    for (int64_t g = 0; g < form_.groups(); ++g) {
      const Line& line = lines[static_cast<size_t>(g)];
      if (std::abs(line.scale) > std::abs(scale)) scale = line.scale;
      offset = std::max(offset, line.offset);
    }
    // One number more lies below 0, so that the largest scale goes there.
    const int outermost = form_.least_scale < 0 ? form_.least_scale : form_.largest_scale;
    block_.scale = as_f16(scale / static_cast<float>(outermost));
    block_.offset =
        form_.has_offsets() ? as_f16(offset / static_cast<float>(form_.largest_offset)) : 0;
  }

  void set_integers(const std::array<Line, kMaxBlockGroups>& lines) {
    for (int64_t g = 0; g < form_.groups(); ++g) {
      const auto at = static_cast<size_t>(g);
      block_.scales[at] = scale_integer(lines[at].scale);
      block_.offsets[at] = offset_integer(lines[at].offset);
    }
  }

  // Takes the neighbours of a group's integers if their error is less.
  void refine_integers(const std::array<Line, kMaxBlockGroups>& lines) {
    for (int64_t g = 0; g < form_.groups(); ++g) {
      const auto at = static_cast<size_t>(g);
      const int scale = scale_integer(lines[at].scale);
      const int offset = offset_integer(lines[at].offset);
      double least = HUGE_VAL;
      for (int s = std::max(scale - 1, form_.least_scale);
           s <= std::min(scale + 1, form_.largest_scale); ++s) {
        for (int o = std::max(offset - 1, 0); o <= std::min(offset + 1, form_.largest_offset);
             ++o) {
          const double error = error_of(form_, values_ + g * form_.group, line_of(s, o));
          if (!(error < least)) continue;
          least = error;
          block_.scales[at] = s;
          block_.offsets[at] = o;
        }
      }
    }
  }

  void set_codes() {
    for (int64_t g = 0; g < form_.groups(); ++g) {
      const auto at = static_cast<size_t>(g);
      const Line line = line_of(block_.scales[at], block_.offsets[at]);
      const float inverse = inverse_of(line.scale);
      for (int64_t i = g * form_.group; i < (g + 1) * form_.group; ++i) {
        block_.codes[static_cast<size_t>(i)] = code_of(form_, values_[i], inverse, line.offset);
      }
    }
  }

  // The two float16 numbers by least squares for the integers and codes. False if they stay.
  bool refit_numbers() {
    Moments moments;
    for (int64_t i = 0; i < kMaxBlockElements; ++i) {
      const auto group = static_cast<size_t>(i / form_.group);
      moments.add(double(block_.scales[group]) * block_.codes[static_cast<size_t>(i)],
                  block_.offsets[group], values_[i]);
    }
    Line numbers;
    if (!moments.solve(block_.offset != 0, numbers)) return false;
    const Line before = {block_.scale, block_.offset};
    block_.scale = as_f16(numbers.scale);
    block_.offset = as_f16(numbers.offset);
    return block_.scale != before.scale || block_.offset != before.offset;
  }

  double error() const {
    double sum = 0;
    for (int64_t i = 0; i < kMaxBlockElements; ++i) {
      const auto group = static_cast<size_t>(i / form_.group);
      const Line line = line_of(block_.scales[group], block_.offsets[group]);
      const double off = values_[i] - (double{line.scale} * block_.codes[static_cast<size_t>(i)] -
                                       double{line.offset});
      sum += off * off;
    }
    return sum;
  }

  const TwoLevelBlock& block() const { return block_; }

 private:
  Line line_of(int scale, int offset) const {
    return {block_.scale * static_cast<float>(scale), block_.offset * static_cast<float>(offset)};
  }
  int scale_integer(float scale) const {
    return whole_within(scale * inverse_of(block_.scale), form_.least_scale, form_.largest_scale);
  }
  int offset_integer(float offset) const {
    return whole_within(offset * inverse_of(block_.offset), 0, form_.largest_offset);
  }

  const TwoLevelForm& form_;
  const float* values_;
  TwoLevelBlock block_;
};

template <class Choose>
std::array<Line, kMaxBlockGroups> each_group(const TwoLevelForm& form, const float* values,
                                             const Choose& choose) {
  std::array<Line, kMaxBlockGroups> lines{};
  for (int64_t g = 0; g < form.groups(); ++g) {
    lines[static_cast<size_t>(g)] = choose(values + g * form.group);
  }
  return lines;
}

}  // namespace

TwoLevelBlock spread_two_levels(const TwoLevelForm& form, const float* values, float share) {
  const auto lines = each_group(
      form, values, [&](const float* group) { return spread_group(form, group, share); });
  BlockFit fit(form, values);
  fit.set_numbers(lines);
  fit.set_integers(lines);
  fit.set_codes();
  return fit.block();
}

TwoLevelBlock fit_two_levels(const TwoLevelForm& form, const float* values) {
  const auto lines =
      each_group(form, values, [&](const float* group) { return fit_group(form, group); });
  BlockFit fit(form, values);
  fit.set_numbers(lines);
  TwoLevelBlock best;
  double least = HUGE_VAL;
  for (int round = 0; round < kRounds; ++round) {
    fit.refine_integers(lines);
    fit.set_codes();
    const double error = fit.error();
    if (error < least) {
      least = error;
      best = fit.block();
    }
    if (!fit.refit_numbers()) break;
  }
  return best;
}

}  // namespace conclave::inline v0::quant
