#include "experts/cuda/tile_choice_sm90.h"

#include "conclave/dtype.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::experts {
namespace {

// Of an H200's L2, where a tile reads the weights of its expert again.
constexpr double kCacheBytesPerSecond = 5.5e12;
// What of the lesser of memory and arithmetic time is not hidden behind the greater.
constexpr double kExposedShare = 0.25;

struct Load {
  double active_experts = 0;
  double rows_of_each = 0;  // mean of the active ones
};

// Of `tokens` tokens that draw top_k of the experts evenly.
Load expected_load(const DeviceExpertsProblem& problem, int64_t tokens) {
  const auto experts = static_cast<double>(problem.num_local_experts);
  const double slots = static_cast<double>(tokens) * static_cast<double>(problem.top_k);
  const double idle = std::pow(1.0 - 1.0 / experts, slots);
  const double active = std::max(experts * (1.0 - idle), 1.0);
  return {.active_experts = active, .rows_of_each = slots / active};
}

// Of one expert's rows: whole ones, and a last one that is half full where rows scatter.
double expected_tiles(double rows, int32_t tile_tokens) {
  const double full = rows / tile_tokens;
  return std::max(1.0, full + 0.5 * (1.0 - std::exp(-2.0 * full)));
}

// Rows that a tile computes at least: the blocks of a cluster take a half each of a tile of more
// than 128 rows, and share the weight rows of one that has fewer.
int32_t computed_tokens(const DeviceTile& tile) {
  const bool halves = tile.cluster > 1 && tile.tokens > 128;
  return halves ? tile.tokens / tile.cluster : tile.tokens;
}

double cost_seconds(const DeviceExpertsProblem& problem, const DeviceKernelRow& row,
                    const DeviceTile& tile, const Load& load) {
  const double matrices = problem.activation.gated ? 3.0 : 2.0;
  const double elements = matrices * static_cast<double>(problem.hidden_size) *
                          static_cast<double>(problem.intermediate_size);
  const double expert_bytes = elements * static_cast<double>(byte_size(problem.weight_dtype));
  const double tiles = load.active_experts * expected_tiles(load.rows_of_each, tile.tokens);
  const double memory =
      std::max(load.active_experts * expert_bytes / (row.terabytes_per_second * 1e12),
               tiles * expert_bytes / kCacheBytesPerSecond);
  const int32_t computed = computed_tokens(tile);
  const double operations =
      load.active_experts * expected_tiles(load.rows_of_each, computed) * computed * 2.0 * elements;
  const double arithmetic = operations / (row.teraflops * 1e12);
  return std::max(memory, arithmetic) + kExposedShare * std::min(memory, arithmetic);
}

}  // namespace

TileChoice choose_tile(const DeviceExpertsProblem& problem,
                       std::span<const DeviceKernelRow* const> rows, int64_t tokens) {
  const Load load = expected_load(problem, tokens);
  TileChoice best;
  for (const DeviceKernelRow* row : rows) {
    for (const DeviceTile& tile : row->tiles(problem)) {
      const double cost = cost_seconds(problem, *row, tile, load) * 1e6;
      if (best.row != nullptr && cost >= best.microseconds) continue;
      best = {.row = row, .tile = tile, .microseconds = cost};
    }
  }
  return best;
}

}  // namespace conclave::inline v0::experts
