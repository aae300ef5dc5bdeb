// Reads a MoeSpec from config.json with a family's table.
#pragma once

#include "checkpoint/config_reader.h"

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstdint>
#include <optional>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// No model exceeds these; they keep products of sizes far inside 63 bits and the work on a hostile
// config small.
inline constexpr int64_t kMaxExperts = 16384;
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;

// `dtype` is the model's arithmetic type, or nothing if the config gives none: then the router's
// own tensor decides what its product is rounded to. The tensors also decide weight_dtype.
// `support` gets the reason if the layer cannot run. Throws Error(kConfigMissingKey, kConfigValue,
// kJsonType).
MoeSpec read_spec(const ConfigReader& config, const Architecture& architecture, int64_t layer,
                  std::optional<DType> dtype, Support& support);

// The ways back: what a configuration calls an activation of the list, or the one that a form makes
// of it, and a score. Empty for activations without a name there.
std::string_view config_activation(ActivationForm form, std::string_view row);
std::string_view config_score(RouterScore score);

}  // namespace conclave::inline v0::checkpoint
