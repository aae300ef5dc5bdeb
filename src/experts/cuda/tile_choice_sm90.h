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

// What the model says of one tile.
double tile_microseconds(const DeviceExpertsProblem& problem, const DeviceKernelRow& row,
                         const DeviceTile& tile, int64_t tokens, int64_t shared_experts = 0);

// Another kernel for calls whose experts are chosen so unevenly that `usual`, one of `rows` for few
// rows an expert, has more than its share of tiles: it goes through experts one by one, limited by
// arithmetic at the hot ones and by memory at the others, which nothing overlaps. Of the same bits
// and the same order of input rows. Without a row where there is none, or where two idle launches
// more would be felt.
TileChoice choose_skewed_tile(const DeviceExpertsProblem& problem,
                              std::span<const DeviceKernelRow* const> rows, const TileChoice& usual,
                              int64_t tokens, int64_t shared_experts = 0);
// Tiles of up to `tile_tokens` rows that so many tokens come to if they choose experts evenly.
double expected_tiles(const DeviceExpertsProblem& problem, int32_t tile_tokens, int64_t tokens,
                      int64_t shared_experts = 0);

}  // namespace conclave::inline v0::experts
