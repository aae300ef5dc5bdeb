#include "checkpoint/fed_model.h"

#include "checkpoint/quantization.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <set>
#include <string>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kMethodName = "quantization_config";

}  // namespace

ModelConfig model_of(const MoeSpec& spec, std::string_view model_type,
                     std::span<const int64_t> layers) {
  validate(spec);
  ModelConfig config;
  config.architecture = find_architecture(model_type);
  if (config.architecture == nullptr) reject_model_type(model_type);
  config.model_type = model_type;
  config.dtype = spec.router.logits_dtype;
  const std::set<int64_t> numbers(layers.begin(), layers.end());
  for (const int64_t number : numbers) {
    if (number < 0 || number >= kMaxHiddenLayers) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "a layer number out of range",
                   .found = std::to_string(number),
                   .limit = fmt::format("0 to {}", kMaxHiddenLayers - 1)});
    }
    config.layers.push_back({.index = number, .spec = spec});
    config.num_hidden_layers = number + 1;
  }
  return config;
}

QuantizedWeights read_method(std::string_view text, DType weight_dtype,
                             std::span<const std::string> modules) {
  if (!is_plain(weight_dtype)) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "give either a spec with codes or a quantisation method, not both",
                 .expected = "MoeSpec.weight_dtype F32, F16 or BF16",
                 .found = std::string(to_string(weight_dtype))});
  }
  const io::JsonDocument document =
      io::JsonDocument::parse(std::string(text), std::string(kMethodName), io::kConfigLimits);
  const Quantization found = read_quantization(document.root(), {}, modules);
  if (found.weights) return *found.weights;
  if (found.leaves_out) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "rules for modules leave the weights as they are",
                 .file = std::string(kMethodName),
                 .expected = "modules with codes",
                 .found = modules.front()});
  }
  const std::string reason = found.reason.empty() ? "" : " (" + found.reason + ")";
  throw Error(ErrorCode::kUnsupportedQuantization,
              {.what = "the weights are " + quantization_reason(found.method + reason),
               .file = std::string(kMethodName),
               .found = found.method});
}

}  // namespace conclave::inline v0::checkpoint
