// The statements of a configuration about quantised weights, for the methods that are read: "fp8",
// "compressed-tensors" and ModelOpt. docs/quantisation.md has the table.
#pragma once

#include "io/json.h"

#include "conclave/spec.h"

#include <optional>
#include <string>

namespace conclave::inline v0::checkpoint {

// Says what quantised matrices are, and how files hold their codes.
struct QuantizedWeights {
  DType element = DType::kF8E4M3;
  QuantSpec spec = {};
  bool in_words = false;  // codes fill words of 32 bits, the lowest bits first
};

struct Quantization {
  std::string method;                       // "fp8"; empty: not quantised
  std::optional<QuantizedWeights> weights;  // empty: these weights are not read
  std::string reason;                       // why not; empty if the method is not known at all
};

// Reads the object quantization_config (or compression_config) of config.json. Throws
// Error(kJsonType, kConfigValue) naming the key if no method writes such a value.
Quantization read_quantization(const io::JsonValue& config);
// Reads the root of hf_quant_config.json, or any object with the same keys.
Quantization read_modelopt(const io::JsonValue& root);

}  // namespace conclave::inline v0::checkpoint
