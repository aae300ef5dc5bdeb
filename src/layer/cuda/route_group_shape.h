// Limits of the launch that routes and groups, for its plan and its kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {

inline constexpr int32_t kMaxRouteGroupColumnsALane = 16;
inline constexpr int64_t kMaxRouteGroupBlocks = 16;
inline constexpr int32_t kMaxRouteGroupThreads = 512;
inline constexpr size_t kMaxRouteGroupSharedBytes = size_t{160} * 1024;

// Rounded up to 16 bytes, so that doubles may follow.
constexpr size_t token_shared_bytes(int64_t num_local_experts, int64_t blocks) {
  const auto words = static_cast<size_t>(num_local_experts * (blocks + 1));
  return (words * sizeof(uint32_t) + 15) / 16 * 16;
}

}  // namespace conclave::inline v0
