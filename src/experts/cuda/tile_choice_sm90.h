// Which kernel and tile serve a number of tokens: a cost model of plain numbers, the same on every
// machine.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::experts {

struct TileChoice {
  const DeviceKernelRow* row = nullptr;
  DeviceTile tile;
  double microseconds = 0;  // as the model has it
};

// The cheapest of the tiles of `rows`, of which each supports the problem; at equal cost the one
// named first. Tokens are taken to choose experts evenly; `shared_experts` of the problem's experts
// and choices are those of every token.
TileChoice choose_tile(const DeviceExpertsProblem& problem,
                       std::span<const DeviceKernelRow* const> rows, int64_t tokens,
                       int64_t shared_experts = 0);

}  // namespace conclave::inline v0::experts
