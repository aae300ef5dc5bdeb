// Decides which layers are MoE, and which of them take their ids from a table.
#pragma once

#include "checkpoint/config_reader.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// No model has more; this keeps the work on a hostile config small.
inline constexpr int64_t kMaxHiddenLayers = 4096;

// Lists of kinds have these words for layers with experts and without, and patterns these letters;
// other words and letters are met in files, too.
inline constexpr std::string_view kSparseKind = "sparse";
inline constexpr std::string_view kDenseKind = "dense";
inline constexpr char kMoeLetter = 'E';
inline constexpr char kOtherLetter = '-';

// The number of layers: its key, or the length of the list of kinds that describes them.
int64_t read_num_layers(const ConfigReader& config, const Architecture& architecture);

// The numbers are ascending. Throws Error(kConfigValue, kJsonType) naming the key.
std::vector<int64_t> moe_layers(const ConfigReader& config, const Architecture& architecture,
                                int64_t count);

bool is_hash_layer(const ConfigReader& config, const Architecture& architecture, int64_t layer);

}  // namespace conclave::inline v0::checkpoint
