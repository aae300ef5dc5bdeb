// What a configuration says of quantised weights, by any of the methods that store e4m3 codes with
// scales: "fp8", "compressed-tensors" and ModelOpt. docs/quantisation.md has the table.
#pragma once

#include "io/json.h"

#include "conclave/spec.h"

#include <optional>
#include <string>

namespace conclave::inline v0::checkpoint {

struct Quantization {
  std::string method;             // "fp8"; empty: not quantised
  std::optional<QuantSpec> spec;  // nothing: these weights are not read
  std::string reason;             // why not; empty for a method that is not known at all
};

// The object quantization_config (or compression_config) of config.json. Throws
// Error(kJsonType, kConfigValue) naming the key for what no method writes.
Quantization read_quantization(const io::JsonValue& config);
// The root of hf_quant_config.json, or anything of the same keys.
Quantization read_modelopt(const io::JsonValue& root);

}  // namespace conclave::inline v0::checkpoint
