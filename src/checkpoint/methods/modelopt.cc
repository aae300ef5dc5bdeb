// ModelOpt, of config.json or of hf_quant_config.json.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "io/text.h"

namespace conclave::inline v0::checkpoint {
namespace {

QuantSpec spec_of_algorithm(const std::string& algorithm) {
  if (algorithm == "FP8") {
    return {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
  }
  if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    return {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  }
  if (algorithm == "FP8_PB_WO") return {.weights = WeightScale::kBlock};
  throw NotRead{"the algorithm " + io::show_name(algorithm)};
}

}  // namespace

QuantizedWeights read_modelopt(const io::JsonValue& config) {
  const auto nested = config.find_set("quantization");
  const auto algorithm = (nested ? *nested : config).find_set("quant_algo");
  if (!algorithm) throw NotRead{"no quant_algo"};
  return e4m3_codes(spec_of_algorithm(std::string(algorithm->as_string())));
}

}  // namespace conclave::inline v0::checkpoint
