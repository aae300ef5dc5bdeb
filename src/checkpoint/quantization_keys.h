// The keys under which a configuration speaks of quantised weights.
#pragma once

#include "io/json.h"

#include <array>
#include <optional>
#include <string_view>

namespace conclave::inline v0::checkpoint {

inline constexpr std::string_view kQuantizationKey = "quantization_config";
// MLX reads this key first, and writes the same settings under both.
inline constexpr std::string_view kMlxKey = "quantization";
inline constexpr std::array kQuantizationKeys = {kQuantizationKey,
                                                 std::string_view("compression_config"), kMlxKey};

// The settings of one configuration, without those nested in it; nothing if there are none. Throws
// Error(kConfigValue) naming the first place where MLX's key and another one differ.
std::optional<io::JsonValue> find_quantization_settings(const io::JsonValue& config);

}  // namespace conclave::inline v0::checkpoint
