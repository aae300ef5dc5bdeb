#include "conclave/quantise.h"

#include "core/checked.h"
#include "core/code_bits.h"
#include "core/weight_types.h"
#include "quant/code_grid.h"
#include "quant/code_quotient.h"
#include "quant/planes.h"
#include "quant/scale_type.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// The shares of the largest magnitude that a search tries as the end of the range. Below 0.6 more
// is lost at the end than is won in between, for values that look normal and groups of 16 to 1024.
constexpr std::array kShares = {0.975F, 0.95F, 0.925F, 0.9F, 0.875F, 0.85F, 0.825F, 0.8F,
                                0.775F, 0.75F, 0.725F, 0.7F, 0.675F, 0.65F, 0.625F, 0.6F};
// Least squares for given codes, codes for given scale: the second round rarely changes a code.
constexpr int kRefits = 2;

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// Infinity is a finite value over a tiny step, and stands for the outermost code.
float quotient_of(float value, float step) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return std::clamp(value / step, -kMost, kMost);
}

// A scale as the file has it, and with the matrix's global scale.
struct Step {
  float stored = 1;
  float effective = 1;
};

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
        grid(*format.codes, bits) {}

  bool has_one_scale() const { return options.quant.weights == WeightScale::kTensor; }

  // Scales of weights are powers of two where those of rows are.
  Step step_of(float raw, float global) const {
    const float wanted = options.quant.power_of_two_scales ? quant::step_of(raw, 1.0F, true) : raw;
    const float stored = quant::round_scale(options.scale_dtype, wanted);
    return {.stored = stored, .effective = stored * global};
  }

  Step step_for(float largest, float global) const {
    return step_of(largest / format.codes->largest / global, global);
  }

  // Writes the codes of values at the step from column `begin` of a row on, and decodes them into
  // `scratch`.
  void round_trip(std::span<const float> values, float step, int64_t begin, std::byte* row,
                  Scratch& scratch) const {
    const auto count = static_cast<int64_t>(values.size());
    std::ranges::transform(values, scratch.quotients.begin(),
                           [step](float value) { return quotient_of(value, step); });
    format.encode(scratch.quotients.data(), begin, count, row);
    format.decode(row, begin, count, scratch.decoded.data());
  }

  // The same for codes that are only tried.
  void round_trip(std::span<const float> values, float step, Scratch& scratch) const {
    scratch.reserve(static_cast<int64_t>(values.size()));
    round_trip(values, step, 0, scratch.codes.data(), scratch);
  }

  double error_of(std::span<const float> values, float step, Scratch& scratch) const {
    round_trip(values, step, scratch);
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double off = double{values[i]} - double{scratch.decoded[i]} * double{step};
      sum += off * off;
    }
    return sum;
  }

  // The step that fits the codes which `step` gives best; the step itself if none does.
  Step refit(std::span<const float> values, const Step& step, float global,
             Scratch& scratch) const {
    round_trip(values, step.effective, scratch);
    double products = 0;
    double squares = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      products += double{values[i]} * double{scratch.decoded[i]};
      squares += double{scratch.decoded[i]} * double{scratch.decoded[i]};
    }
    const double best = squares > 0 ? products / squares / double{global} : 0.0;
    const bool is_scale = best > 0 && best <= double{std::numeric_limits<float>::max()};
    return is_scale ? step_of(static_cast<float>(best), global) : step;
  }

  Step search(std::span<const float> values, float largest, float global, Scratch& scratch) const {
    Step best = step_for(largest, global);
    double least = error_of(values, best.effective, scratch);
    const auto attempt = [&](const Step& step) {
      const double error = error_of(values, step.effective, scratch);
      if (error >= least) return;
      least = error;
      best = step;
    };
    float last = best.stored;
    for (const float share : kShares) {
      const Step step = step_for(largest * share, global);
      if (std::exchange(last, step.stored) != step.stored) attempt(step);
    }
    for (int i = 0; i < kRefits; ++i) attempt(refit(values, best, global, scratch));
    return best;
  }

  Step choose(std::span<const float> values, float global, Scratch& scratch) const {
    const float largest = largest_magnitude(values);
    if (options.rule == ScaleRule::kAmax || largest == 0) return step_for(largest, global);
    return search(values, largest, global, scratch);
  }

  void encode(std::span<const float> values, int64_t begin, float step, std::byte* row,
              Scratch& scratch, QuantiseError& error) const {
    scratch.reserve(static_cast<int64_t>(values.size()));
    round_trip(values, step, begin, row, scratch);
    for (size_t at = 0; at < values.size(); ++at) {
      const double value = values[at];
      const double off = value - double{scratch.decoded[at]} * double{step};
      error.squared_error += off * off;
      error.squared_values += value * value;
      error.worst_steps = std::max(
          error.worst_steps,
          grid.steps(value / double{step}, code_at(row, begin + static_cast<int64_t>(at), bits)));
    }
  }

  // Returns the scale as the file has it.
  float quantise_block(std::span<const float> values, int64_t cols, const WeightBlock& block,
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
      encode(part_of(row), block.col_begin, step.effective, result.codes.data() + row * row_bytes,
             scratch, result.error);
    }
    return step.stored;
  }

  QuantiseOptions options;
  const quant::WeightFormat& format;
  int64_t bits;
  quant::CodeGrid grid;
};

Support Quantiser::supports(const QuantiseOptions& options) {
  const quant::WeightFormat* const format = quant::find_format(options.codes);
  const std::string type(to_string(options.codes));
  if (format == nullptr || format->codes == nullptr) return Support::no(type + " are not codes");
  const QuantSpec& quant = options.quant;
  if (quant.weights == WeightScale::kNone) return Support::no("codes have scales");
  if (Support takes = format->takes(quant); !takes) return takes;
  if (quant.zeros != WeightZero::kNone) return Support::no("zero points are not chosen");
  if (quant.has_column_order) return Support::no("orders of columns are not chosen");
  if (quant.has_column_factors) return Support::no("factors of columns are not chosen");
  if (quant.activations == ActivationScale::kTensorStatic) {
    return Support::no("steps of rows that are the same for all tokens come from calibration");
  }
  if (Support type_fits = quant::is_scale_type(options.scale_dtype); !type_fits) return type_fits;
  if (quant.has_global_scale && quant.weights != WeightScale::kBlock) {
    return Support::no("a global scale stands beside scales of blocks");
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
  for (const float share : kShares) {
    const float scale = matrix_scale(largest * share);
    if (scale != scales.back()) scales.push_back(scale);
  }
  return scales;
}

double Quantiser::squared_error(std::span<const float> values, float scale) const {
  Scratch scratch;
  return impl_->error_of(values, scale, scratch);
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
      scales.push_back(impl_->quantise_block(values, cols, block, matrix_scale, scratch, result));
    }
  }
  quant::append_scales(impl_->options.scale_dtype, scales, result.scales);
  return result;
}

}  // namespace conclave::inline v0
