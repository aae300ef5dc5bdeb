#include "checkpoint/quantization.h"

#include "checkpoint/methods/module_rules.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include <fmt/format.h>

#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

// Formats come and go by themselves: a method may name codes that none of them reads.
void check_format(const QuantizedWeights& weights) {
  const quant::WeightFormat* const format = quant::find_format(weights.element);
  if (format == nullptr || format->codes == nullptr) {
    throw NotRead{fmt::format("codes of {}", to_string(weights.element))};
  }
  if (Support takes = format->takes(weights.spec); !takes) throw NotRead{takes.reason()};
}

Quantization attempt(const Method& method, const io::JsonValue& config,
                     std::span<const std::string> modules) {
  Quantization result{.method = std::string(method.name), .weights = {}, .reason = {}};
  try {
    const auto weights = weights_of_modules(method.read(config), modules);
    if (weights) check_format(*weights);
    result.weights = weights;
    result.leaves_out = !weights;
  } catch (const NotRead& refusal) {
    result.reason = refusal.reason;
    result.kernel_order = refusal.kernel_order;
  }
  return result;
}

// The row that wrote the configuration; null if there is none.
const Method* method_of(const io::JsonValue& config, std::string_view file,
                        std::string_view experts) {
  const auto given = config.find_set("quant_method");
  for (const Method& method : known_methods()) {
    if (!method.experts.empty() && method.experts != experts) continue;
    if (given ? given->as_string() == method.name : !file.empty() && method.file == file) {
      return &method;
    }
  }
  if (given) return nullptr;
  for (const Method& method : known_methods()) {
    if (method.wrote != nullptr && method.wrote(config)) return &method;
  }
  return nullptr;
}

Quantization read_from(const io::JsonValue& config, std::string_view file, std::string_view experts,
                       std::span<const std::string> modules) {
  if (const Method* const method = method_of(config, file, experts)) {
    return attempt(*method, config, modules);
  }
  const auto given = config.find_set("quant_method");
  if (!given) {
    return {
        .method = "a method that " + config.path() + " does not name", .weights = {}, .reason = {}};
  }
  const NotRead refusal = unread_method(given->as_string());
  return {.method = io::show_name(given->as_string()),
          .weights = {},
          .reason = refusal.reason,
          .kernel_order = refusal.kernel_order};
}

}  // namespace

Quantization read_quantization(const io::JsonValue& config, std::string_view experts,
                               std::span<const std::string> modules) {
  return read_from(config, {}, experts, modules);
}

Quantization find_quantization_file(const io::Directory& directory) {
  for (const Method& method : known_methods()) {
    if (method.file.empty() || !directory.contains(method.file)) continue;
    const io::JsonDocument described = directory.read_json(method.file);
    return read_from(described.root(), method.file, {}, {});
  }
  return {};
}

}  // namespace conclave::inline v0::checkpoint
