// Which kernel and tile serve a number of tokens: a cost model of plain numbers, the same on every
// machine.
#pragma once

#include "experts/catalog.h"
#include "experts/cuda/device_experts.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::experts {

struct TileChoice {
  const DeviceKernelRow* row = nullptr;
  DeviceTile tile;
  double microseconds = 0;  // by the model
};

// The cheapest tile of `rows`, each of which supports the problem; at equal cost, the first.
// Assumes that tokens choose experts evenly; every token uses `shared_experts` of the problem's
// experts, which count among its choices.
TileChoice choose_tile(const ExpertsProblem& problem, std::span<const DeviceKernelRow* const> rows,
                       int64_t tokens, int64_t shared_experts = 0);

// The model's time for one tile.
double tile_microseconds(const ExpertsProblem& problem, const DeviceKernelRow& row,
                         const DeviceTile& tile, int64_t tokens, int64_t shared_experts = 0);

// Another kernel, with the same bits and the same order of input rows, for calls that choose
// experts so unevenly that `usual`, which suits few rows per expert, gets more than its share of
// tiles: `usual` takes experts one by one, bound by arithmetic at the hot ones and by memory at the
// others, and never overlaps the two. `row` is null if there is no such kernel, or if two more idle
// launches would be felt.
TileChoice choose_skewed_tile(const ExpertsProblem& problem,
                              std::span<const DeviceKernelRow* const> rows, const TileChoice& usual,
                              int64_t tokens, int64_t shared_experts = 0);
// Expected number of tiles of up to `tile_tokens` rows if tokens choose experts evenly.
double expected_tiles(const ExpertsProblem& problem, int32_t tile_tokens, int64_t tokens,
                      int64_t shared_experts = 0);

}  // namespace conclave::inline v0::experts
