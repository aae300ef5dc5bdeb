#include "conclave/quantise.h"

#include "core/checked.h"
#include "core/code_bits.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "quant/code_grid.h"
#include "quant/code_quotient.h"
#include "quant/planes.h"
#include "quant/scale_type.h"
#include "quant/search_shares.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// Least squares for given codes, codes for given scale: the second round rarely changes a code.
constexpr int kRefits = 2;

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// A scale as the file has it, and with the matrix's global scale. The code `zero` stands for 0; it
// may lie between codes, beside `offset`, which is then taken from codes times scale.
struct Step {
  float stored = 1;
  float effective = 1;
  float zero = 0;
  float offset = 0;
};

// Bounds of a quotient: infinity is a finite value over a tiny step, and stands for the outermost
// code.
struct Bounds {
  float least = -std::numeric_limits<float>::max();
  float largest = std::numeric_limits<float>::max();
};

float quotient_of(float value, const Step& step, const Bounds& bounds) {
  return std::clamp(value / step.effective + step.zero, bounds.least, bounds.largest);
}

// Whether codes are whole numbers that follow one another, as zero points are among them.
bool counts_evenly(const quant::CodeBook& codes, int64_t bits) {
  std::vector<float> values;
  for (int code = 0; code < 1 << bits; ++code) {
    values.push_back(codes.decode(static_cast<uint8_t>(code)));
  }
  std::ranges::sort(values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != std::floor(values[0]) + static_cast<float>(i)) return false;
  }
  return true;
}

void append_float(float number, std::vector<std::byte>& bytes) {
  const auto* const begin = static_cast<const std::byte*>(static_cast<const void*>(&number));
  bytes.insert(bytes.end(), begin, begin + sizeof(number));
}

// One caller's memory.
struct Scratch {
  std::vector<float> quotients;
  std::vector<float> decoded;
  std::vector<std::byte> codes;
  std::vector<float> block;

  void reserve(int64_t count) {
    const auto size = static_cast<size_t>(count);
    if (quotients.size() >= size) return;
    quotients.resize(size);
    decoded.resize(size);
    codes.resize(size);
  }
};

}  // namespace

void QuantiseError::add(const QuantiseError& other) {
  squared_error += other.squared_error;
  squared_values += other.squared_values;
  worst_steps = std::max(worst_steps, other.worst_steps);
}

double QuantiseError::relative() const {
  return squared_values > 0 ? std::sqrt(squared_error / squared_values) : 0.0;
}

struct Quantiser::Impl {
  explicit Impl(const QuantiseOptions& given)
      : options(given),
        format(quant::format_of(given.codes)),
        bits(bit_size(given.codes)),
        grid(*format.codes, bits),
        bounds(bounds_of(given.code_bits)) {}

  static Bounds bounds_of(int64_t code_bits) {
    if (code_bits == 0) return {};
    const auto middle = static_cast<float>(int64_t{1} << (code_bits - 1));
    return {.least = -middle, .largest = middle - 1};
  }
  float least_code() const { return std::max(grid.least(), bounds.least); }
  float largest_code() const { return std::min(grid.largest(), bounds.largest); }
  // The largest magnitude that both signs have.
  float largest_of_both() const { return std::min(format.codes->largest, bounds.largest); }

  bool has_one_scale() const { return options.quant.weights == WeightScale::kTensor; }
  bool has_zeros() const { return options.quant.zeros != WeightZero::kNone; }
  bool has_offsets() const { return options.quant.zeros == WeightZero::kOffset; }

  // Scales of weights are powers of two where those of rows are.
  Step step_of(float raw, float global) const {
    const float wanted = options.quant.power_of_two_scales ? quant::step_of(raw, 1.0F, true) : raw;
    const float stored = quant::round_scale(options.scale_dtype, wanted);
    return {.stored = stored, .effective = stored * global};
  }

  Step step_for(float largest, float global) const {
    return step_of(largest / largest_of_both() / global, global);
  }

  // The step and zero point for codes that span a share of the values, and 0. The least code is no
  // zero point: the first version of GPTQ stores them less one, and readers differ about -1.
  Step step_between(std::span<const float> values, float share) const {
    const auto [lowest, highest] = std::ranges::minmax(values);
    const float low = std::min(lowest * share, 0.0F);
    const float high = std::max(highest * share, 0.0F);
    const float least = least_code() + 1;
    const float steps = largest_code() - least;
    Step step = step_of(std::max((high - low) / (steps + 1), high / steps), 1);
    step.zero =
        std::clamp(std::nearbyint(least_code() - low / step.effective), least, largest_code());
    return step;
  }

  // A number of the scales' type.
  float rounded(float value) const {
    if (value == 0) return 0;
    return std::copysign(quant::round_scale(options.scale_dtype, std::abs(value)), value);
  }

  // The same for codes of which the least stands for the least value of the share, a number of the
  // scales' type: files that have it in place of an offset lose nothing.
  Step step_from_least(std::span<const float> values, float share) const {
    const auto [lowest, highest] = std::ranges::minmax(values);
    const float middle = (lowest + highest) / 2;
    const float low = rounded(middle + (lowest - middle) * share);
    const float high = middle + (highest - middle) * share;
    const float least = least_code();
    Step step = step_of(std::max(high - low, 0.0F) / (largest_code() - least), 1);
    step.offset = -(low - least * step.effective);
    step.zero = step.offset / step.effective;
    return step;
  }

  Step step_with_zero(std::span<const float> values, float share) const {
    return has_offsets() ? step_from_least(values, share) : step_between(values, share);
  }

  // Writes the codes of values at the step from column `begin` of a row on, and decodes them into
  // `scratch`.
  void round_trip(std::span<const float> values, const Step& step, int64_t begin, std::byte* row,
                  Scratch& scratch) const {
    const auto count = static_cast<int64_t>(values.size());
    std::ranges::transform(values, scratch.quotients.begin(),
                           [&](float value) { return quotient_of(value, step, bounds); });
    format.encode(scratch.quotients.data(), begin, count, row);
    format.decode(row, begin, count, scratch.decoded.data());
    if (step.zero == 0) return;
    for (float& code : std::span(scratch.decoded).first(values.size())) code -= step.zero;
  }

  // The same for codes that are only tried.
  void round_trip(std::span<const float> values, const Step& step, Scratch& scratch) const {
    scratch.reserve(static_cast<int64_t>(values.size()));
    round_trip(values, step, 0, scratch.codes.data(), scratch);
  }

  double error_of(std::span<const float> values, const Step& step, Scratch& scratch) const {
    round_trip(values, step, scratch);
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double off = double{values[i]} - double{scratch.decoded[i]} * double{step.effective};
      sum += off * off;
    }
    return sum;
  }

  // The step that fits the codes which `step` gives best; the step itself if none does.
  Step refit(std::span<const float> values, const Step& step, float global,
             Scratch& scratch) const {
    round_trip(values, step, scratch);
    double products = 0;
    double squares = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      products += double{values[i]} * double{scratch.decoded[i]};
      squares += double{scratch.decoded[i]} * double{scratch.decoded[i]};
    }
    const double best = squares > 0 ? products / squares / double{global} : 0.0;
    const bool is_scale = best > 0 && best <= double{std::numeric_limits<float>::max()};
    if (!is_scale) return step;
    Step fitted = step_of(static_cast<float>(best), global);
    fitted.zero = step.zero;
    return fitted;
  }

  Step search(std::span<const float> values, float largest, float global, Scratch& scratch) const {
    const auto step_for_share = [&](float share) {
      return has_zeros() ? step_with_zero(values, share) : step_for(largest * share, global);
    };
    Step best = step_for_share(1);
    double least = error_of(values, best, scratch);
    const auto attempt = [&](const Step& step) {
      const double error = error_of(values, step, scratch);
      if (error >= least) return;
      least = error;
      best = step;
    };
    float last = best.stored;
    for (const float share : quant::kShares) {
      const Step step = step_for_share(share);
      if (std::exchange(last, step.stored) != step.stored) attempt(step);
    }
    // Another scale would move what an offset stands for.
    const int refits = has_offsets() ? 0 : kRefits;
    for (int i = 0; i < refits; ++i) attempt(refit(values, best, global, scratch));
    return best;
  }

  Step choose(std::span<const float> values, float global, Scratch& scratch) const {
    const float largest = largest_magnitude(values);
    if (options.rule == ScaleRule::kAmax || largest == 0) {
      return has_zeros() ? step_with_zero(values, 1) : step_for(largest, global);
    }
    return search(values, largest, global, scratch);
  }

  void encode(std::span<const float> values, int64_t begin, const Step& step, std::byte* row,
              Scratch& scratch, QuantiseError& error) const {
    scratch.reserve(static_cast<int64_t>(values.size()));
    round_trip(values, step, begin, row, scratch);
    for (size_t at = 0; at < values.size(); ++at) {
      const double value = values[at];
      const double off = value - double{scratch.decoded[at]} * double{step.effective};
      error.squared_error += off * off;
      error.squared_values += value * value;
      error.worst_steps = std::max(
          error.worst_steps, grid.steps(value / double{step.effective} + double{step.zero},
                                        code_at(row, begin + static_cast<int64_t>(at), bits)));
    }
  }

  Step quantise_block(std::span<const float> values, int64_t cols, const WeightBlock& block,
                      float matrix_scale, Scratch& scratch, QuantisedRows& result) const {
    const auto part_of = [&](int64_t row) {
      return values.subspan(static_cast<size_t>(row * cols + block.col_begin),
                            static_cast<size_t>(block.col_end - block.col_begin));
    };
    Step step{.stored = matrix_scale, .effective = matrix_scale};
    if (!has_one_scale()) {
      scratch.block.clear();
      for (int64_t row = block.row_begin; row < block.row_end; ++row) {
        const auto part = part_of(row);
        scratch.block.insert(scratch.block.end(), part.begin(), part.end());
      }
      step = choose(scratch.block, options.quant.has_global_scale ? matrix_scale : 1.0F, scratch);
    }
    const int64_t row_bytes = packed_bytes(options.codes, cols);
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      encode(part_of(row), block.col_begin, step, result.codes.data() + row * row_bytes, scratch,
             result.error);
    }
    return step;
  }

  QuantiseOptions options;
  const quant::WeightFormat& format;
  int64_t bits;
  quant::CodeGrid grid;
  Bounds bounds;
};

namespace {

Support supports_zeros(const QuantiseOptions& options, const quant::CodeBook& codes) {
  const QuantSpec& quant = options.quant;
  if (quant.zeros == WeightZero::kNone) return Support::yes();
  if (quant.weights == WeightScale::kTensor || quant.has_global_scale) {
    return Support::no("zero points and offsets stand beside scales of rows and groups");
  }
  if (counts_evenly(codes, bit_size(options.codes))) return Support::yes();
  return Support::no("zero points are whole numbers, which these codes are not");
}

Support supports_bits(const QuantiseOptions& options, const quant::CodeBook& codes) {
  if (options.code_bits == 0) return Support::yes();
  const int64_t most = bit_size(options.codes);
  if (options.code_bits < 2 || options.code_bits > most) {
    return Support::no("code_bits must be between 2 and the width of the type");
  }
  if (counts_evenly(codes, most)) return Support::yes();
  return Support::no("only evenly spaced integer codes can be narrower than their type");
}

}  // namespace

Support Quantiser::supports(const QuantiseOptions& options) {
  const quant::WeightFormat* const format = quant::find_format(options.codes);
  const std::string type(to_string(options.codes));
  if (format == nullptr || format->codes == nullptr) return Support::no(type + " are not codes");
  const QuantSpec& quant = options.quant;
  if (quant.weights == WeightScale::kNone) return Support::no("codes have scales");
  if (Support takes = format->takes(quant); !takes) return takes;
  if (Support zeros = supports_zeros(options, *format->codes); !zeros) return zeros;
  if (Support bits = supports_bits(options, *format->codes); !bits) return bits;
  if (quant.has_column_order) return Support::no("the quantiser cannot choose a column order");
  if (quant.has_column_factors) return Support::no("the quantiser cannot choose column factors");
  if (has_input_scale(quant)) {
    return Support::no("static activation scales must come from calibration");
  }
  if (Support type_fits = quant::is_scale_type(options.scale_dtype); !type_fits) return type_fits;
  if (quant.has_global_scale && quant.weights != WeightScale::kBlock) {
    return Support::no("a global scale is allowed only with block scales");
  }
  return Support::yes();
}

Quantiser::Quantiser(const QuantiseOptions& options) {
  if (const Support support = supports(options); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "weights cannot be quantised to this form", .found = support.reason()});
  }
  impl_ = std::make_unique<const Impl>(options);
}
Quantiser::Quantiser(Quantiser&&) noexcept = default;
Quantiser::~Quantiser() = default;

bool Quantiser::needs_matrix_scale() const {
  return impl_->has_one_scale() || impl_->options.quant.has_global_scale;
}

int64_t Quantiser::block_rows() const {
  const QuantSpec& quant = impl_->options.quant;
  return quant.weights == WeightScale::kBlock ? quant.block_rows : 1;
}

float Quantiser::matrix_scale(float largest) const {
  if (impl_->has_one_scale()) return impl_->step_for(largest, 1.0F).effective;
  // The block of the largest magnitude then has the largest scale.
  const float range =
      impl_->format.codes->largest * quant::largest_scale(impl_->options.scale_dtype);
  const float global = largest / range;
  return global > 0 ? global : 1.0F;
}

std::vector<float> Quantiser::matrix_scales(float largest) const {
  std::vector<float> scales = {matrix_scale(largest)};
  if (impl_->options.rule != ScaleRule::kSearch || !impl_->has_one_scale()) return scales;
  for (const float share : quant::kShares) {
    const float scale = matrix_scale(largest * share);
    if (scale != scales.back()) scales.push_back(scale);
  }
  return scales;
}

double Quantiser::squared_error(std::span<const float> values, float scale) const {
  Scratch scratch;
  return impl_->error_of(values, {.stored = scale, .effective = scale}, scratch);
}

QuantisedRows Quantiser::quantise(std::span<const float> values, int64_t rows, int64_t cols,
                                  float matrix_scale) const {
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, impl_->options.codes, impl_->options.quant, rows, cols);
  QuantisedRows result;
  result.codes.resize(static_cast<size_t>(rows * packed_bytes(impl_->options.codes, cols)));
  std::vector<float> scales;
  Scratch scratch;
  for (int64_t top = 0; top < rows; top += plane.block_rows) {
    for (int64_t left = 0; left < cols; left += plane.block_cols) {
      const WeightBlock block{.row_begin = top,
                              .row_end = std::min(rows, top + plane.block_rows),
                              .col_begin = left,
                              .col_end = std::min(cols, left + plane.block_cols)};
      const Step step = impl_->quantise_block(values, cols, block, matrix_scale, scratch, result);
      scales.push_back(step.stored);
      if (impl_->has_zeros()) {
        append_float(impl_->has_offsets() ? step.offset : step.zero, result.zeros);
      }
    }
  }
  quant::append_scales(impl_->options.scale_dtype, scales, result.scales);
  return result;
}

}  // namespace conclave::inline v0
