// The inverse of read_model_config: writes a configuration by the table from which it is read.
#pragma once

#include "checkpoint/architecture.h"

#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// A MoE layer as a configuration shall describe it.
struct DescribedLayer {
  int64_t index = 0;
  MoeSpec spec = {};
};

// The text of a config.json of this model_type with the keys that the table knows, for at least one
// layer. What the table has no key for, or another rule, comes back otherwise when it is read: that
// is for the caller to find. Routers compute in float32.
std::string write_config(const Architecture& architecture, std::string_view model_type,
                         int64_t num_layers, std::span<const DescribedLayer> layers);

// Numbers of GGUF files are float32; the shortest decimal that is the same one reads better than
// all its digits.
double shortest_decimal(double number);

}  // namespace conclave::inline v0::checkpoint
