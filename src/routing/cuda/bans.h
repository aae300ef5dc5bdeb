// Experts that a call bans, in device memory.
#pragma once

#include <cstdint>

namespace conclave::inline v0::routing {

// An expert is banned for a token if either says so. Flags are bytes; not 0: banned.
struct DeviceBans {
  const uint8_t* rows = nullptr;      // [T, E + Z], or null
  int64_t stride = 0;                 // from a token's row to the next; 0: one row for all
  const uint8_t* left_out = nullptr;  // [E + Z], for all tokens, or null

  bool any() const { return rows != nullptr || left_out != nullptr; }
};

}  // namespace conclave::inline v0::routing
