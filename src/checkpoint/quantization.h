// The statements of a configuration about quantised weights: which method wrote them, and what it
// means. docs/quantisation.md has the table.
#pragma once

#include "checkpoint/methods/method.h"
#include "io/directory.h"
#include "io/json.h"

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

struct Quantization {
  std::string method;                       // "fp8"; empty: not quantised
  std::optional<QuantizedWeights> weights;  // empty: these weights are not read, or left out
  std::string reason;                       // why not; empty if the method is not known at all
  std::string kernel_order = {};            // as NotRead has it
  bool leaves_out = false;                  // rules say that the modules stay as they are
};

// Reads the object quantization_config (or compression_config) of config.json. Throws
// Error(kJsonType, kConfigValue) naming the key if no method writes such a value.
// `experts` is the key expert_dtype of the model's configuration, if it has one. With modules it is
// what rules say of these alone.
Quantization read_quantization(const io::JsonValue& config, std::string_view experts = {},
                               std::span<const std::string> modules = {});
// Reads what older exports say in a file beside config.json, if there is one.
Quantization find_quantization_file(const io::Directory& directory);

}  // namespace conclave::inline v0::checkpoint
