// The most ranks that a layer is split over: far above any cluster, since each costs memory.
#pragma once

#include "conclave/version.h"

#include <cstdint>

namespace conclave::inline v0 {

inline constexpr int32_t kMaxRanks = int32_t{1} << 20;

}  // namespace conclave::inline v0
