#include "convert/module_codes.h"

#include "convert/parallel.h"

#include "conclave/error.h"
#include "conclave/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

namespace conclave::tool {
namespace {

// Rows are read until their values fill 512 KiB: enough to hide what each read costs, and small
// beside the caches of many threads.
constexpr int64_t kStripElements = int64_t{1} << 17;

// The global scale that readers see: files hold its inverse, rounded.
float as_read(float global) { return 1.0F / (1.0F / global); }

ModuleCodes::Expert expert_of(const ConvertedModule& module) {
  const ModulePart& part = module.parts.front();
  return {module.layer, *part.id.mlp(), part.expert};
}

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

}  // namespace

ModuleCodes::ModuleCodes(const Context& context, const SourceModel& source,
                         const ConversionPlan& plan, ScaleRule rule)
    : context_(context),
      plan_(plan),
      largest_(plan.modules.size()),
      matrix_scales_(plan.modules.size(), 1.0F) {
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    const ConvertedModule& module = plan.modules[i];
    const bool is_down = module.parts.front().id.matrix() == WeightMatrix::kDown;
    if (module.form.quant.has_global_scale && !is_down) {
      pairs_[expert_of(module)].push_back(static_cast<int32_t>(i));
    }
    if (!sources_.contains(module.layer)) {
      sources_[module.layer] = source.checkpoint().layer_source(module.layer);
      source_quant_[module.layer] = source.checkpoint().layer(module.layer).spec.quant;
    }
    const WeightForm& form = module.form;
    if (form.method.empty() || quantisers_.contains(form.name)) continue;
    quantisers_.emplace(form.name, Quantiser({.codes = form.dtype,
                                              .quant = form.quant,
                                              .scale_dtype = form.scale_dtype,
                                              .rule = rule}));
  }
}

const ConvertedModule& ModuleCodes::module_of(const Strip& strip) const {
  return plan_.modules[static_cast<size_t>(strip.module)];
}

const Quantiser& ModuleCodes::quantiser(const WeightForm& form) const {
  return quantisers_.at(form.name);
}

std::vector<Strip> ModuleCodes::strips(int32_t index) const {
  const ConvertedModule& module = plan_.modules[static_cast<size_t>(index)];
  const int64_t block = module.form.method.empty() ? 1 : quantiser(module.form).block_rows();
  const int64_t fitting = kStripElements / std::max<int64_t>(module.cols, 1) / block * block;
  const int64_t rows = std::max(block, fitting);
  std::vector<Strip> strips;
  for (size_t part = 0; part < module.parts.size(); ++part) {
    for (int64_t begin = 0; begin < module.parts[part].rows; begin += rows) {
      strips.push_back({.module = index,
                        .part = part,
                        .row_begin = begin,
                        .row_end = std::min(module.parts[part].rows, begin + rows)});
    }
  }
  return strips;
}

std::vector<float> ModuleCodes::read(const Strip& strip) const {
  const ConvertedModule& module = module_of(strip);
  const ModulePart& part = module.parts[strip.part];
  const int64_t rows = strip.row_end - strip.row_begin;
  std::vector<float> values(static_cast<size_t>(rows * module.cols));
  read_values(source_quant_.at(module.layer), *sources_.at(module.layer), part.id, part.expert,
              {.row_begin = strip.row_begin,
               .row_end = strip.row_end,
               .col_begin = 0,
               .col_end = module.cols},
              values);
  require_finite(strip, values);
  return values;
}

void ModuleCodes::require_finite(const Strip& strip, std::span<const float> values) const {
  const auto wrong =
      std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  if (wrong == values.end()) return;
  const ConvertedModule& module = module_of(strip);
  const ModulePart& part = module.parts[strip.part];
  const int64_t at = wrong - values.begin();
  throw Error(ErrorCode::kTensorValue,
              {.what = "a weight is not finite",
               .tensor = sources_.at(module.layer)->locate(part.id, part.expert),
               .expected = "finite weights, since others have no code",
               .found = fmt::format("{} in row {}, column {}", *wrong,
                                    strip.row_begin + at / module.cols, at % module.cols)});
}

QuantisedRows ModuleCodes::encode(const Strip& strip) const {
  const ConvertedModule& module = module_of(strip);
  std::vector<float> values = read(strip);
  if (module.form.method.empty()) return encode_plain(strip, std::move(values));
  return quantiser(module.form)
      .quantise(values, strip.row_end - strip.row_begin, module.cols,
                matrix_scales_[static_cast<size_t>(strip.module)]);
}

QuantisedRows ModuleCodes::encode_plain(const Strip& strip, std::vector<float> values) const {
  const ConvertedModule& module = module_of(strip);
  const Shape shape = {strip.row_end - strip.row_begin, module.cols};
  QuantisedRows rows;
  rows.codes.resize(dense_bytes(module.form.dtype, shape));
  const TensorView stored{.data = rows.codes.data(), .dtype = module.form.dtype, .shape = shape};
  convert({.data = values.data(), .dtype = DType::kF32, .shape = shape}, stored);
  std::vector<float> rounded(values.size());
  convert(stored, {.data = rounded.data(), .dtype = DType::kF32, .shape = shape});
  for (size_t i = 0; i < values.size(); ++i) {
    const double off = double{values[i]} - double{rounded[i]};
    rows.error.squared_error += off * off;
    rows.error.squared_values += double{values[i]} * double{values[i]};
  }
  return rows;
}

void ModuleCodes::prepare(std::span<const int32_t> modules) {
  for (const int32_t index : modules) {
    const WeightForm& form = plan_.modules[static_cast<size_t>(index)].form;
    if (form.method.empty() || !quantiser(form).needs_matrix_scale()) continue;
    float largest = 0;
    for (const int32_t other : in_one_range(index)) largest = std::max(largest, largest_of(other));
    const float scale = choose_scale(index, largest);
    matrix_scales_[static_cast<size_t>(index)] =
        form.quant.has_global_scale ? as_read(scale) : scale;
  }
}

// Kernels multiply gate and up as one matrix, whose global scale is one number.
std::vector<int32_t> ModuleCodes::in_one_range(int32_t index) const {
  const auto found = pairs_.find(expert_of(plan_.modules[static_cast<size_t>(index)]));
  const WeightId id = plan_.modules[static_cast<size_t>(index)].parts.front().id;
  if (id.matrix() == WeightMatrix::kDown || found == pairs_.end()) return {index};
  return found->second;
}

float ModuleCodes::largest_of(int32_t index) {
  std::optional<float>& known = largest_[static_cast<size_t>(index)];
  if (known) return *known;
  const std::vector<Strip> all = strips(index);
  std::vector<float> found(all.size());
  for_each_index(context_, all.size(),
                 [&](size_t i) { found[i] = largest_magnitude(read(all[i])); });
  known = largest_magnitude(found);
  return *known;
}

float ModuleCodes::choose_scale(int32_t index, float largest) const {
  const Quantiser& codes = quantiser(plan_.modules[static_cast<size_t>(index)].form);
  const std::vector<float> scales = codes.matrix_scales(largest);
  if (scales.size() == 1) return scales.front();
  const std::vector<Strip> all = strips(index);
  std::vector<std::vector<double>> errors(all.size());
  for_each_index(context_, all.size(), [&](size_t i) {
    const std::vector<float> values = read(all[i]);
    for (const float scale : scales) errors[i].push_back(codes.squared_error(values, scale));
  });
  std::vector<double> sums(scales.size());
  for (const std::vector<double>& strip : errors) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += strip[i];
  }
  return scales[static_cast<size_t>(std::ranges::min_element(sums) - sums.begin())];
}

std::vector<std::byte> ModuleCodes::single(const PlannedTensor& tensor) const {
  const auto index = static_cast<size_t>(tensor.module);
  std::vector<std::byte> bytes(tensor.bytes);
  if (tensor.content == FormTensor::Content::kSizes) {
    const std::array sizes = {plan_.modules[index].rows, plan_.modules[index].cols};
    std::memcpy(bytes.data(), sizes.data(), bytes.size());
    return bytes;
  }
  const float scale = matrix_scales_[index];
  const float stored = tensor.content == FormTensor::Content::kInverse ? 1.0F / scale : scale;
  std::memcpy(bytes.data(), &stored, bytes.size());
  return bytes;
}

}  // namespace conclave::tool
