#include "convert/forms/method_form.h"

#include "convert/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

QuantiseOptions options_of(const MethodForm& form, ScaleRule rule) {
  return {.codes = form.codes,
          .code_bits = form.code_bits,
          .quant = form.quant,
          .scale_dtype = form.scale_dtype,
          .rule = rule};
}

}  // namespace

MethodTarget::MethodTarget(std::string name, const MethodForm& written, const MethodForm& quantised,
                           ScaleRule rule)
    : name_(std::move(name)), writer_(written), quantiser_(options_of(quantised, rule)) {}

// Methods have whole groups only, and blocks of fused matrices begin with their rows.
void MethodTarget::check(const ConvertedModule& module) const {
  const QuantSpec& quant = writer_.form().quant;
  const bool blocks = quant.weights == WeightScale::kBlock;
  if (blocks && quant.block_rows == 1) require_whole_groups(module, quant.block_cols);
  for (size_t i = 0; blocks && i + 1 < module.parts.size(); ++i) {
    if (module.parts[i].rows % quant.block_rows == 0) continue;
    refuse_module(module, "a block of scales would hold rows of two fused matrices",
                  fmt::format("{} rows", module.parts[i].rows),
                  fmt::format("a multiple of {} rows", quant.block_rows));
  }
  for (const auto& [axis, size, whole] : {std::tuple("columns", module.cols, writer_.whole_cols()),
                                          std::tuple("rows", module.rows, writer_.whole_rows())}) {
    if (size % whole == 0) continue;
    refuse_module(module, fmt::format("the {} do not fill words of codes", axis),
                  fmt::format("{} {}", size, axis), fmt::format("a multiple of {}", whole));
  }
}

std::vector<WrittenTensor> MethodTarget::written(const ConvertedModule& module) const {
  const int64_t stack = stack_of(module);
  std::vector<WrittenTensor> tensors =
      writer_.tensors(matrix_of(module), module.rows / std::max<int64_t>(stack, 1), module.cols);
  for (WrittenTensor& tensor : tensors) {
    if (stack == 0) continue;
    tensor.shape.insert(tensor.shape.begin(), stack);
    tensor.bytes *= static_cast<uint64_t>(stack);
  }
  return tensors;
}

std::vector<PlannedTensor> MethodTarget::tensors(const ConvertedModule& module) const {
  std::vector<PlannedTensor> planned;
  for (WrittenTensor& tensor : written(module)) {
    planned.push_back({.name = std::move(tensor.name),
                       .type = std::string(to_string(tensor.dtype)),
                       .shape = std::move(tensor.shape),
                       .bytes = tensor.bytes,
                       .plane = tensor.plane,
                       .streamed = planned.empty() && tensor.is_plane});
  }
  return planned;
}

std::vector<std::byte> MethodTarget::finish(const ConvertedModule& module,
                                            const PlannedTensor& tensor,
                                            const GatheredRows& rows) const {
  const std::vector<WrittenTensor> tensors = written(module);
  const auto found = std::ranges::find(tensors, tensor.name, &WrittenTensor::name);
  if (!found->is_plane) {
    const std::vector<int32_t> order = order_of(module.cols);
    return writer_.encode(*found, module.rows, module.cols,
                          {.codes = rows.codes,
                           .scales = rows.scales,
                           .zeros = rows.zeros,
                           .order = order,
                           .matrix_scale = rows.matrix_scale});
  }
  // Strips of a matrix with one scale have each brought it.
  const auto scales = std::span(rows.scales).first(tensor.bytes);
  return {scales.begin(), scales.end()};
}

nlohmann::ordered_json MethodTarget::configuration(const std::vector<std::string>& kept) const {
  return nlohmann::ordered_json::parse(writer_.configuration(kept));
}

std::vector<TextFile> MethodTarget::files(const std::vector<std::string>& kept) const {
  if (writer_.file().empty()) return {};
  return {{.name = std::string(writer_.file()), .text = json_text(configuration(kept), 2) + "\n"}};
}

}  // namespace conclave::inline v0::conversion
