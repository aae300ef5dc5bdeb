// The most experts and replicas that one placement counts: far above any layer, since each costs
// memory on every rank and a step of every plan.
#pragma once

#include "conclave/version.h"

#include <cstdint>

namespace conclave::inline v0 {

inline constexpr int32_t kMaxPlaces = int32_t{1} << 24;

}  // namespace conclave::inline v0
