// Names of devices: "cpu", "cuda", "cuda:1".
#pragma once

#include "conclave/version.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int32_t ordinal = 0;
};

// An empty text means "cpu", and "cuda" means device 0. Throws Error(kUnknownName).
Device parse_device(std::string_view text);
// Returns "cpu" or "cuda:0".
std::string to_string(const Device& device);

}  // namespace conclave::inline v0
