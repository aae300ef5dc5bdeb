#include "experts/cuda/tile_choice.h"

#include "core/checked.h"

#include "conclave/dtype.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace conclave::inline v0::experts {
namespace {

// Share of the lesser of memory and arithmetic time that the greater does not hide.
constexpr double kExposedShare = 0.15;
// Middles of eight equally likely parts of a normal distribution.
constexpr std::array kNormalParts = {-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534};

// Share of both products' time that gathering rows in the up product's loads costs.
constexpr double kGatherShare = 0.03;

struct Load {
  double active_experts = 0;
  double rows_of_each = 0;  // mean over the active ones
  double deviation = 0;
};

// Load from `tokens` tokens that each choose `top_k` different ones of `num_experts` experts, all
// equally likely.
Load expected_load(int64_t num_experts, int64_t top_k, int64_t tokens) {
  if (num_experts == 0 || top_k == 0) return {};
  const auto experts = static_cast<double>(num_experts);
  const double slots = static_cast<double>(tokens) * static_cast<double>(top_k);
  const double chance = std::min(static_cast<double>(top_k) / experts, 1.0);
  const double idle = std::pow(1.0 - chance, static_cast<double>(tokens));
  const double active = std::max(experts * (1.0 - idle), 1.0);
  const double rows = slots / active;
  return {.active_experts = active,
          .rows_of_each = rows,
          .deviation = std::sqrt(rows * (1.0 - chance))};
}

struct TileWork {
  double tiles = 0;  // per expert
  double rows = 0;   // computed per expert, including those beyond its own
};

// Rates that a tile of a kernel reaches on the problem's device.
struct Rates {
  double flops = 0;  // per second
  double bytes = 0;
  double row_step = 0;
  double end_depth = 0;
};

double teraflops_of(const TileCost& cost, const cuda::DeviceRates& device) {
  return cost.product_share * device.*cost.products;
}

Rates rates_of(const TileCost& cost, const DeviceTile& tile, const cuda::DeviceRates& device) {
  if (tile.sorted_input && cost.sorted_product_share > 0) {
    return {.flops = cost.sorted_product_share * device.*cost.products * 1e12,
            .bytes = cost.sorted_memory_share * device.memory_terabytes * 1e12,
            .row_step = static_cast<double>(cost.sorted_row_step),
            .end_depth = static_cast<double>(cost.sorted_end_depth)};
  }
  const double share = tile.sorted_input ? 1.0 - kGatherShare : 1.0;
  return {.flops = teraflops_of(cost, device) * 1e12 / share,
          .bytes = cost.memory_share * device.memory_terabytes * 1e12,
          .row_step = static_cast<double>(cost.row_step > 0 ? cost.row_step
                                                            : std::max(tile.tokens / 4, 8))};
}

TileWork expected_work(const Load& load, const DeviceTile& tile, double step) {
  TileWork work;
  for (const double part : kNormalParts) {
    const double rows = std::max(1.0, load.rows_of_each + load.deviation * part);
    const double tiles = std::ceil(rows / tile.tokens);
    const double last = rows - (tiles - 1.0) * tile.tokens;
    const double computed = std::min<double>(tile.tokens, std::ceil(last / step) * step);
    work.tiles += tiles / kNormalParts.size();
    work.rows += ((tiles - 1.0) * tile.tokens + computed) / kNormalParts.size();
  }
  return work;
}

// Each token is read once, each row written and read again: in the type of the weights, or in that
// which their codes become.
double copy_seconds(const ExpertsProblem& problem, const DeviceKernelRow& row, int64_t tokens) {
  const int64_t bits = bit_size(row.reads_factors ? row.decoded : problem.weight_dtype);
  const double rows = static_cast<double>(tokens) * static_cast<double>(1 + 2 * problem.top_k);
  const double row_bytes = static_cast<double>(problem.hidden_size * bits) / 8.0;
  const cuda::DeviceRates& device = problem.gpu().rates;
  return device.launch_seconds + rows * row_bytes / (device.copy_terabytes * 1e12);
}

// Share that the ends of the two products add to their time.
double end_share(const ExpertsProblem& problem, double end_depth) {
  const double up = problem.activation.gated ? 2.0 : 1.0;
  const double ends = up / static_cast<double>(problem.hidden_size) +
                      1.0 / static_cast<double>(problem.intermediate_size);
  return end_depth * ends / (up + 1.0);
}

// Loads of the routed experts, and of the shared ones that every token uses.
using Loads = std::array<Load, 2>;

// How much longer the two products take than if their items ended together on all multiprocessors,
// each of which computes whole items.
double waves_share(const ExpertsProblem& problem, const DeviceTile& tile, const Loads& loads,
                   double row_step) {
  const double up = problem.activation.gated ? 2.0 : 1.0;
  const int64_t up_rows = static_cast<int64_t>(up) * problem.intermediate_size;
  const auto waves = [&](int64_t rows) {
    double items = 0;
    for (const Load& load : loads) {
      if (load.active_experts == 0) continue;
      items += load.active_experts * expected_work(load, tile, row_step).tiles *
               static_cast<double>(ceil_div(rows, int64_t{tile.features}));
    }
    if (items == 0) return 1.0;
    const double share = items / problem.gpu().multiprocessors;
    return std::ceil(share) / share;
  };
  return (up * waves(up_rows) + waves(problem.hidden_size)) / (up + 1.0);
}

double cost_seconds(const ExpertsProblem& problem, const DeviceKernelRow& row,
                    const DeviceTile& tile, const Loads& loads, int64_t tokens) {
  const double matrices = problem.activation.gated ? 3.0 : 2.0;
  const double elements = matrices * static_cast<double>(problem.hidden_size) *
                          static_cast<double>(problem.intermediate_size);
  const double expert_bytes = elements * static_cast<double>(bit_size(problem.weight_dtype)) / 8.0;
  const cuda::DeviceRates& device = problem.gpu().rates;
  const Rates rates = rates_of(row.cost, tile, device);
  double bytes = 0;
  double cache_bytes = 0;
  double operations = 0;
  for (const Load& load : loads) {
    if (load.active_experts == 0) continue;
    const TileWork work = expected_work(load, tile, rates.row_step);
    bytes += load.active_experts * expert_bytes;
    cache_bytes += load.active_experts * work.tiles * expert_bytes / tile.cluster;
    operations += load.active_experts * work.rows * 2.0 * elements;
  }
  // Each tile or cluster reads its expert's weights from L2 again, or decodes them.
  const double cache_rate = device.cache_terabytes * 1e12;
  const double decode_share = row.cost.decode_share;
  const double memory = std::max(bytes / rates.bytes, cache_bytes / cache_rate);
  const double decoding = decode_share > 0 ? cache_bytes / (cache_rate * decode_share) : 0;
  const double arithmetic =
      decoding + operations / rates.flops * (1.0 + end_share(problem, rates.end_depth));
  double before = 0;
  if (tile.sorted_input) {
    // One expert's rows are in order already.
    const bool in_order = problem.num_local_experts == 1 && problem.top_k == 1;
    if (!in_order) before = copy_seconds(problem, row, tokens);
  }
  const double products =
      std::max(memory, arithmetic) + kExposedShare * std::min(memory, arithmetic);
  constexpr int32_t kWideFeatures = 256;
  if (row.cost.wide_share == 0 || tile.features < kWideFeatures) return before + products;
  // Fewer items fill the device worse.
  DeviceTile usual = tile;
  usual.features = kWideFeatures / 2;
  return before + products * row.cost.wide_share *
                      waves_share(problem, tile, loads, rates.row_step) /
                      waves_share(problem, usual, loads, rates.row_step);
}

Loads expected_loads(const ExpertsProblem& problem, int64_t tokens, int64_t shared_experts) {
  return {expected_load(problem.num_local_experts - shared_experts, problem.top_k - shared_experts,
                        tokens),
          expected_load(shared_experts, shared_experts, tokens)};
}

}  // namespace

TileChoice choose_tile(const ExpertsProblem& problem, std::span<const DeviceKernelRow* const> rows,
                       int64_t tokens, int64_t shared_experts) {
  const Loads loads = expected_loads(problem, tokens, shared_experts);
  TileChoice best;
  for (const DeviceKernelRow* row : rows) {
    for (const DeviceTile& tile : row->tiles(problem)) {
      const double cost = cost_seconds(problem, *row, tile, loads, tokens) * 1e6;
      if (best.row != nullptr && cost >= best.microseconds) continue;
      best = {.row = row, .tile = tile, .microseconds = cost};
    }
  }
  return best;
}

double tile_microseconds(const ExpertsProblem& problem, const DeviceKernelRow& row,
                         const DeviceTile& tile, int64_t tokens, int64_t shared_experts) {
  return cost_seconds(problem, row, tile, expected_loads(problem, tokens, shared_experts), tokens) *
         1e6;
}

TileChoice choose_skewed_tile(const ExpertsProblem& problem,
                              std::span<const DeviceKernelRow* const> rows, const TileChoice& usual,
                              int64_t tokens, int64_t shared_experts) {
  // Two launches without work take 4 to 8 us: with few rows, and so few hot tiles, only long calls
  // can afford them.
  constexpr double kManyRows = 48;
  constexpr double kLeastMicroseconds = 600;
  constexpr double kLeastOfFewRows = 2000;
  // Fewer tokens make too few hot tiles.
  constexpr int64_t kLeastTokens = 128;
  // Factor by which it may be slower if choices happen to be even.
  constexpr double kMostLoss = 1.25;
  if (tokens < kLeastTokens || problem.top_k >= problem.num_local_experts) return {};
  const Loads loads = expected_loads(problem, tokens, shared_experts);
  const double cost = cost_seconds(problem, *usual.row, usual.tile, loads, tokens) * 1e6;
  const bool many = loads[0].rows_of_each >= kManyRows;
  if (cost < (many ? kLeastMicroseconds : kLeastOfFewRows)) return {};
  if (usual.row->arithmetic.empty()) return {};
  TileChoice best;
  for (const DeviceKernelRow* row : rows) {
    const cuda::DeviceRates& device = problem.gpu().rates;
    const bool for_more = teraflops_of(row->cost, device) > teraflops_of(usual.row->cost, device);
    if (!for_more || row->arithmetic != usual.row->arithmetic) continue;
    for (const DeviceTile& tile : row->tiles(problem)) {
      if (tile.sorted_input != usual.tile.sorted_input) continue;
      const double own = cost_seconds(problem, *row, tile, loads, tokens) * 1e6;
      if (own > cost * kMostLoss || (best.row != nullptr && own >= best.microseconds)) continue;
      best = {.row = row, .tile = tile, .microseconds = own};
    }
  }
  return best;
}

double expected_tiles(const ExpertsProblem& problem, int32_t tile_tokens, int64_t tokens,
                      int64_t shared_experts) {
  double tiles = 0;
  for (const Load& load : expected_loads(problem, tokens, shared_experts)) {
    if (load.active_experts == 0) continue;
    tiles += load.active_experts * expected_work(load, {.tokens = tile_tokens}, 8).tiles;
  }
  return tiles;
}

}  // namespace conclave::inline v0::experts
