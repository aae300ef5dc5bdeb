#include "convert/module_codes.h"

#include "convert/forms/target_form.h"
#include "convert/parallel.h"

#include "conclave/error.h"
#include "conclave/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

namespace conclave::inline v0::conversion {
namespace {

// Rows are read until their values fill 512 KiB: enough to hide what each read costs, and small
// beside the caches of many threads.
constexpr int64_t kStripElements = int64_t{1} << 17;

ModuleCodes::Expert expert_of(const ConvertedModule& module) {
  const ModulePart& part = module.parts.front();
  return {module.layer, *part.id.mlp(), part.expert};
}

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// Rows of two matrices in turn.
std::vector<float> alternate_rows(std::span<const float> even, std::span<const float> odd,
                                  int64_t cols) {
  std::vector<float> rows;
  rows.reserve(even.size() + odd.size());
  for (size_t begin = 0; begin < even.size(); begin += static_cast<size_t>(cols)) {
    for (const auto& matrix : {even, odd}) {
      const auto row = matrix.subspan(begin, static_cast<size_t>(cols));
      rows.insert(rows.end(), row.begin(), row.end());
    }
  }
  return rows;
}

}  // namespace

ModuleCodes::ModuleCodes(const Context& context, const SourceModel& source,
                         const ConversionPlan& plan)
    : context_(context),
      plan_(plan),
      largest_(plan.modules.size()),
      matrix_scales_(plan.modules.size(), 1.0F) {
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    const ConvertedModule& module = plan.modules[i];
    const bool is_down = module.parts.front().id.matrix() == WeightMatrix::kDown;
    if (module.form->pairs_share_scale() && !is_down) {
      pairs_[expert_of(module)].push_back(static_cast<int32_t>(i));
    }
    if (!sources_.contains(module.layer)) {
      sources_[module.layer] = source.layer_source(module.layer);
      source_quant_[module.layer] = source.checkpoint().layer(module.layer).spec.quant;
    }
  }
}

const ConvertedModule& ModuleCodes::module_of(const Strip& strip) const {
  return plan_.modules[static_cast<size_t>(strip.module)];
}

std::vector<Strip> ModuleCodes::strips(int32_t index) const {
  const ConvertedModule& module = plan_.modules[static_cast<size_t>(index)];
  // Two rows that alternate come from one row each of two matrices.
  const bool alternates = module.parts.front().other.has_value();
  const int64_t block = module.form->block_rows() * (alternates ? 2 : 1);
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
  const int64_t matrices = part.other ? 2 : 1;
  const WeightBlock block{.row_begin = strip.row_begin / matrices,
                          .row_end = strip.row_end / matrices,
                          .col_begin = 0,
                          .col_end = module.cols};
  const auto count = static_cast<size_t>((block.row_end - block.row_begin) * module.cols);
  const auto read_matrix = [&](WeightId id) {
    std::vector<float> values(count);
    read_values(source_quant_.at(module.layer), *sources_.at(module.layer), id, part.expert, block,
                values);
    return values;
  };
  std::vector<float> values = read_matrix(part.id);
  if (part.other) values = alternate_rows(values, read_matrix(*part.other), module.cols);
  require_finite(strip, values);
  return values;
}

std::string ModuleCodes::origin_of(const Strip& strip, int64_t row) const {
  const ConvertedModule& module = module_of(strip);
  const ModulePart& part = module.parts[strip.part];
  const WeightId id = part.other && row % 2 != 0 ? *part.other : part.id;
  return sources_.at(module.layer)->locate(id, part.expert);
}

void ModuleCodes::require_finite(const Strip& strip, std::span<const float> values) const {
  const auto wrong =
      std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  if (wrong == values.end()) return;
  const ConvertedModule& module = module_of(strip);
  const int64_t at = wrong - values.begin();
  const int64_t row = strip.row_begin + at / module.cols;
  throw Error(
      ErrorCode::kTensorValue,
      {.what = "a weight is not finite",
       .tensor = origin_of(strip, row),
       .expected = "finite weights, since others have no code",
       .found = fmt::format("{} in row {}, column {}", *wrong,
                            module.parts[strip.part].other ? row / 2 : row, at % module.cols)});
}

QuantisedRows ModuleCodes::encode(const Strip& strip) const {
  const ConvertedModule& module = module_of(strip);
  return module.form->encode(read(strip), strip.row_end - strip.row_begin, module.cols,
                             matrix_scale(strip.module));
}

void ModuleCodes::prepare(std::span<const int32_t> modules) {
  for (const int32_t index : modules) {
    const TargetForm& form = *plan_.modules[static_cast<size_t>(index)].form;
    if (form.matrix_quantiser() == nullptr) continue;
    float largest = 0;
    for (const int32_t other : in_one_range(index)) largest = std::max(largest, largest_of(other));
    matrix_scales_[static_cast<size_t>(index)] = form.as_read(choose_scale(index, largest));
  }
}

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
  const Quantiser& codes = *plan_.modules[static_cast<size_t>(index)].form->matrix_quantiser();
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

}  // namespace conclave::inline v0::conversion
