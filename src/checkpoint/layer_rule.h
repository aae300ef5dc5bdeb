// Decides which layers are MoE, and which of them take their ids from a table.
#pragma once

#include "checkpoint/config_reader.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0::checkpoint {

// No model has more; this keeps the work on a hostile config small.
inline constexpr int64_t kMaxHiddenLayers = 4096;

// The number of layers: its key, or the length of the list of kinds that describes them.
int64_t read_num_layers(const ConfigReader& config, const Architecture& architecture);

// The numbers are ascending. Throws Error(kConfigValue, kJsonType) naming the key.
std::vector<int64_t> moe_layers(const ConfigReader& config, const Architecture& architecture,
                                int64_t count);

bool is_hash_layer(const ConfigReader& config, const Architecture& architecture, int64_t layer);

}  // namespace conclave::inline v0::checkpoint
