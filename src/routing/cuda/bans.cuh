// Looks bans up.
#pragma once

#include "routing/cuda/bans.h"

#include <cstdint>

namespace conclave::inline v0::routing::device {

__device__ __forceinline__ bool is_banned(const DeviceBans& bans, int64_t token, int64_t column) {
  if (bans.rows != nullptr && bans.rows[token * bans.stride + column] != 0) return true;
  return bans.left_out != nullptr && bans.left_out[column] != 0;
}

}  // namespace conclave::inline v0::routing::device
