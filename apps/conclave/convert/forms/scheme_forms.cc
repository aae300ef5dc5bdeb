// The forms of weight_forms(): codes and scales in tensors of their own, as the methods "fp8" and
// "compressed-tensors" have them.
#include "convert/forms/catalog.h"
#include "synth/form_tensors.h"

#include "conclave/format.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <utility>

namespace conclave::tool {
namespace {

QuantiseOptions options_of(const WeightForm& form, ScaleRule rule) {
  return {.codes = form.dtype, .quant = form.quant, .scale_dtype = form.scale_dtype, .rule = rule};
}

PlannedTensor::Content content_of(const FormTensor& tensor) {
  if (tensor.content == FormTensor::Content::kInverse) return PlannedTensor::Content::kInverse;
  if (tensor.content == FormTensor::Content::kSizes) return PlannedTensor::Content::kSizes;
  return PlannedTensor::Content::kPlane;
}

template <class T>
std::vector<std::byte> bytes_of(const T& value, uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  std::memcpy(out.data(), &value, bytes);
  return out;
}

class SchemeForm final : public TargetForm {
 public:
  SchemeForm(const WeightForm& form, ScaleRule rule)
      : form_(form), quantiser_(options_of(form, rule)) {}

  std::string name() const override { return std::string(form_.name); }

  // The method has whole groups only, and blocks of fused matrices begin with their rows.
  void check(const ConvertedModule& module) const override {
    const QuantSpec& quant = form_.quant;
    if (quant.weights != WeightScale::kBlock) return;
    if (quant.block_rows == 1) require_whole_groups(module, quant.block_cols);
    for (size_t i = 0; i + 1 < module.parts.size(); ++i) {
      if (module.parts[i].rows % quant.block_rows == 0) continue;
      refuse_module(module, "a block of scales would hold rows of two fused matrices",
                    fmt::format("{} rows", module.parts[i].rows),
                    fmt::format("a multiple of {} rows", quant.block_rows));
    }
  }

  std::vector<PlannedTensor> tensors(const ConvertedModule& module) const override {
    std::vector<PlannedTensor> planned;
    for (FormTensor& tensor : form_tensors(form_, module.rows, module.cols, module.name)) {
      planned.push_back({.name = module.name + "." + tensor.name,
                         .type = std::string(to_string(tensor.dtype)),
                         .shape = std::move(tensor.shape),
                         .bytes = tensor.bytes,
                         .plane = tensor.plane,
                         .content = content_of(tensor),
                         .streamed = planned.empty()});
    }
    return planned;
  }

  int64_t block_rows() const override { return quantiser_.block_rows(); }
  const Quantiser* matrix_quantiser() const override {
    return quantiser_.needs_matrix_scale() ? &quantiser_ : nullptr;
  }
  // Kernels multiply gate and up as one matrix, whose global scale is one number.
  bool pairs_share_scale() const override { return form_.quant.has_global_scale; }
  // Files hold the inverse of a global scale, rounded.
  float as_read(float matrix_scale) const override {
    return form_.quant.has_global_scale ? 1.0F / (1.0F / matrix_scale) : matrix_scale;
  }

  QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                       float matrix_scale) const override {
    return quantiser_.quantise(values, rows, cols, matrix_scale);
  }

  std::vector<std::byte> finish(const ConvertedModule& module, const PlannedTensor& tensor,
                                const GatheredRows& rows) const override {
    if (tensor.content == PlannedTensor::Content::kSizes) {
      return bytes_of(std::array{module.rows, module.cols}, tensor.bytes);
    }
    if (tensor.content == PlannedTensor::Content::kInverse) {
      return bytes_of(1.0F / rows.matrix_scale, tensor.bytes);
    }
    // Strips of a matrix with one scale have each brought it.
    const auto scales = std::span(rows.scales).first(tensor.bytes);
    return {scales.begin(), scales.end()};
  }

  nlohmann::ordered_json configuration(const std::vector<std::string>& kept) const override {
    return quantization_config(form_, kept);
  }

 private:
  WeightForm form_;
  Quantiser quantiser_;
};

}  // namespace

std::vector<FormRow> scheme_forms() {
  std::vector<FormRow> rows;
  for (const WeightForm& form : weight_forms()) {
    const bool written =
        !form.method.empty() && Quantiser::supports(options_of(form, ScaleRule::kAmax));
    if (!written) continue;
    rows.push_back({.name = std::string(form.name),
                    .make = [form](FormOptions&, ScaleRule rule) -> FormPointer {
                      return std::make_shared<SchemeForm>(form, rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::tool
