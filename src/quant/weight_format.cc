#include "quant/weight_format.h"

#include "core/dcheck.h"

#include <algorithm>
#include <vector>

namespace conclave::inline v0::quant {

namespace {

const WeightFormat* find_in(const Catalog<WeightFormat>& catalog, DType element) noexcept {
  const auto rows = catalog.rows();
  const auto found = std::ranges::find(rows, element, &WeightFormat::element);
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace

const WeightFormat* find_format(DType element) noexcept {
  return find_in(format_catalog(), element);
}

const WeightFormat& format_of(DType element) noexcept {
  const WeightFormat* format = find_format(element);
  CONCLAVE_DCHECK(format != nullptr);
  return *format;
}

const WeightFormat* find_panel_format(DType element) noexcept {
  return find_in(panel_catalog(), element);
}

const WeightFormat& panel_format_of(DType element) noexcept {
  const WeightFormat* format = find_panel_format(element);
  CONCLAVE_DCHECK(format != nullptr);
  return *format;
}

const WeightFormat& known_format_of(DType element) noexcept {
  const WeightFormat* format = find_known_format(element);
  CONCLAVE_DCHECK(format != nullptr);
  return *format;
}

bool has_values_of(DType type, DType other) {
  const CodeBook& codes = *known_format_of(type).codes;
  const CodeBook& others = *known_format_of(other).codes;
  for (int code = 0; code < 1 << bit_size(other); ++code) {
    const float value = others.decode(static_cast<uint8_t>(code));
    const float read = codes.decode(codes.encode(value));
    const bool both_nan = value != value && read != read;
    if (!both_nan && read != value) return false;
  }
  return true;
}

DType scale_dtype(const MoeSpec& spec) {
  const QuantSpec& quant = spec.quant;
  for (const WeightForm& form : format_of(spec.weight_dtype).forms) {
    const QuantSpec& known = form.quant;
    const bool same = known.weights == quant.weights && known.block_rows == quant.block_rows &&
                      known.block_cols == quant.block_cols &&
                      known.has_global_scale == quant.has_global_scale;
    if (same) return form.scale_dtype;
  }
  return DType::kF32;
}

std::string known_formats(bool codes) {
  std::vector<std::string_view> names;
  for (const WeightFormat& format : format_catalog().rows()) {
    if (codes || format.codes == nullptr) names.push_back(to_string(format.element));
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i != 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace conclave::inline v0::quant

namespace conclave::inline v0 {

std::vector<WeightForm> weight_forms() {
  std::vector<WeightForm> forms;
  for (const quant::WeightFormat& format : quant::format_catalog().rows()) {
    forms.insert(forms.end(), format.forms.begin(), format.forms.end());
  }
  return forms;
}

}  // namespace conclave::inline v0
