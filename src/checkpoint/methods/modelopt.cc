// ModelOpt, of config.json or of hf_quant_config.json: an algorithm for all modules, or for each.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/shared_planes.h"
#include "io/text.h"

#include <optional>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kNvfp4Group = 16;
constexpr int64_t kMxGroup = 32;

// Codes of e2m1 under the names of plain matrices, scales of scales, and steps of rows that are
// not needed while rows stay as they are.
constexpr std::array kNvfp4 = {
    pairs_of_codes("", ""), global_scale("_scale_2", ""), global_scale("_weight_scale_2", ""),
    unused(".input_scale"), unused("_input_scale", ""),
};
constexpr std::array kMxfp4 = {pairs_of_codes("", ""), exponents("_scale", ""),
                               exponents("_weight_scale", ""), unused(".input_scale"),
                               unused("_input_scale", "")};
constexpr std::array kMxfp8 = {exponents("_scale", ""), exponents("_weight_scale", "")};

QuantizedWeights nvfp4(const io::JsonValue& config, std::string_view note) {
  QuantizedWeights weights{.element = DType::kF4, .planes = kNvfp4, .note = note};
  const auto group = config.find_set("group_size");
  set_block(weights.spec, 1, group ? block_size(*group) : kNvfp4Group);
  weights.spec.has_global_scale = true;
  return weights;
}

QuantizedWeights in_mx_groups(DType element, std::span<const StoredPlane> planes,
                              std::string_view note) {
  QuantizedWeights weights{.element = element, .planes = planes, .note = note};
  set_block(weights.spec, 1, kMxGroup);
  return weights;
}

QuantizedWeights read_algorithm(const std::string& algorithm, const io::JsonValue& config) {
  if (algorithm == "FP8") {
    return e4m3_codes(
        {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic});
  }
  if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    return e4m3_codes({.weights = WeightScale::kChannel, .activations = ActivationScale::kToken});
  }
  if (algorithm == "FP8_PB_WO") return e4m3_codes({.weights = WeightScale::kBlock});
  if (algorithm == "W4A16_NVFP4") return nvfp4(config, {});
  if (algorithm == "NVFP4" || algorithm == "W4A8_NVFP4_FP8") return nvfp4(config, kPlainRows);
  if (algorithm == "W4A8_MXFP4_FP8") return in_mx_groups(DType::kF4, kMxfp4, kPlainRows);
  if (algorithm == "MXFP8") return in_mx_groups(DType::kF8E4M3, kMxfp8, kPlainRows);
  if (algorithm == "W4A16_AWQ" || algorithm == "W4A8_AWQ") {
    throw NotRead{"the algorithm " + algorithm + ", whose rows are scaled before products"};
  }
  throw NotRead{"the algorithm " + io::show_name(algorithm)};
}

// Layers are listed one by one; those of routed experts must agree.
QuantizedWeights read_mixed(const io::JsonValue& config) {
  std::optional<io::JsonValue> found;
  for (const io::JsonMember& layer : config.at("quantized_layers").members()) {
    if (layer.key.find(".experts") == std::string_view::npos) continue;
    const std::string algorithm = text_of(layer.value, "quant_algo", "");
    if (found && text_of(*found, "quant_algo", "") != algorithm) {
      throw NotRead{"experts of several algorithms"};
    }
    found = layer.value;
  }
  if (!found) throw NotRead{"no experts among quantized_layers"};
  return read_algorithm(text_of(*found, "quant_algo", ""), *found);
}

}  // namespace

QuantizedWeights read_modelopt(const io::JsonValue& config) {
  const auto nested = config.find_set("quantization");
  const io::JsonValue& stated = nested ? *nested : config;
  const auto algorithm = stated.find_set("quant_algo");
  if (!algorithm) throw NotRead{"no quant_algo"};
  if (algorithm->as_string() == "MIXED_PRECISION") return read_mixed(stated);
  return read_algorithm(std::string(algorithm->as_string()), stated);
}

}  // namespace conclave::inline v0::checkpoint
