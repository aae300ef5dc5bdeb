// The method "fp8": e4m3 with scales named weight_scale_inv, which multiply all the same.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "io/text.h"

#include "conclave/error.h"

#include <nlohmann/json.hpp>

namespace conclave::inline v0::checkpoint {

QuantizedWeights read_fp8(const io::JsonValue& config) {
  const std::string fmt = text_of(config, "fmt", "e4m3");
  if (fmt != "e4m3" && fmt != "float8_e4m3fn") throw NotRead{"codes of " + io::show_name(fmt)};
  QuantSpec spec{.weights = WeightScale::kTensor};
  if (const auto block = config.find_set("weight_block_size")) set_block(*block, spec);
  const std::string scheme = text_of(config, "activation_scheme", "dynamic");
  const std::string scales = text_of(config, "scale_fmt", "float");
  if (scales != "float" && scales != "ue8m0") {
    throw NotRead{"scales of " + io::show_name(scales)};
  }
  if (scheme == "dynamic") {
    set_dynamic_rows(spec);
    spec.power_of_two_scales = scales == "ue8m0";
  } else if (scheme == "static") {
    spec.activations = ActivationScale::kTensorStatic;
  } else {
    config.at("activation_scheme")
        .reject(ErrorCode::kConfigValue, "no such activation scheme", "dynamic or static");
  }
  return usual_codes(DType::kF8E4M3, spec);
}

std::string write_fp8(const MethodForm& form, const std::vector<std::string>& kept) {
  const QuantSpec& quant = form.quant;
  const bool fixed = quant.activations == ActivationScale::kTensorStatic;
  nlohmann::ordered_json config = {{"quant_method", form.method},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", fixed ? "static" : "dynamic"},
                                   {"weight_block_size", nullptr}};
  if (quant.weights == WeightScale::kBlock) {
    config["weight_block_size"] = {quant.block_rows, quant.block_cols};
  }
  if (quant.power_of_two_scales) config["scale_fmt"] = "ue8m0";
  if (!kept.empty()) config["modules_to_not_convert"] = kept;
  return config.dump();
}

}  // namespace conclave::inline v0::checkpoint
