#include "experts/cuda/sm90/tile/tile.h"

#include "experts/cuda/sm90/hopper_support.h"

#include <algorithm>
#include <array>
#include <limits>

namespace conclave::inline v0::experts {
namespace {

constexpr int32_t kTileTokens = 128;
constexpr int32_t kDepthBytes = 128;

constexpr DeviceTile kSingle = {
    .tokens = kTileTokens, .features = 256, .depth = kDepthBytes, .stages = 4};
constexpr DeviceTile kPair = {
    .tokens = kTileTokens, .features = 256, .depth = kDepthBytes, .stages = 4, .cluster = 2};
constexpr DeviceTile sorted(DeviceTile tile) {
  tile.sorted_input = true;
  return tile;
}
// Pairs of blocks read weights from L2 once but wait for one another, which is better if rows are
// long and not too many. No pair gathers its rows: it would wait the longest.
constexpr std::array kTiles = {kSingle, sorted(kSingle), sorted(kPair)};

// 192 features per tile if tiles of 192 compute over a twentieth fewer columns than `features`
// would.
int32_t down_features(int64_t hidden_size, int32_t features) {
  constexpr int32_t kMedium = 192;
  const auto covered = [&](int64_t step) { return (hidden_size + step - 1) / step * step; };
  return covered(kMedium) * 20 < covered(features) * 19 ? kMedium : features;
}

std::string to_string(const ProductTile& tile) {
  return std::to_string(tile.features) + " s" + std::to_string(tile.stages) + " c" +
         std::to_string(tile.cluster) + (tile.group > 0 ? " g" + std::to_string(tile.group) : "") +
         (tile.gathers ? " gathered" : "");
}

}  // namespace

Support tile_sm90_supports(const ExpertsProblem& problem) {
  Support support = supports_on_hopper(problem, {DType::kBF16, DType::kF16});
  if (!support) return support;
  // The walk over tiles counts in 32 bits.
  const int64_t token_tiles =
      max_token_tiles(problem.max_tokens * problem.top_k, problem.num_local_experts, kTileTokens);
  const int64_t feature_tiles =
      std::max(2 * problem.intermediate_size, problem.hidden_size) / 128 + 1;
  if (token_tiles > std::numeric_limits<int32_t>::max() / 2 / feature_tiles) {
    return Support::no("counts at most 2^30 tiles; max_tokens of " +
                       std::to_string(problem.max_tokens) + " makes " +
                       std::to_string(token_tiles) + " x " + std::to_string(feature_tiles));
  }
  return Support::yes();
}

std::span<const DeviceTile> tile_sm90_tiles(const ExpertsProblem& problem) {
  // Only kernels that gather have the other formulas.
  if (!tile_sm90_common(problem.activation)) return std::span(kTiles).first(1);
  return kTiles;
}

int64_t tile_sm90_stride(const ExpertsProblem& problem) {
  return (problem.intermediate_size + 63) / 64 * 64;
}

size_t tile_sm90_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return kTileQueueBytes + static_cast<size_t>(tokens * problem.top_k * tile_sm90_stride(problem) *
                                               byte_size(problem.weight_dtype));
}

TilePlan tile_sm90_plan(const ExpertsProblem& problem, const DeviceTile& tile) {
  ProductTile up = {.features = tile.features, .stages = tile.stages, .cluster = tile.cluster};
  ProductTile down = up;
  up.gathers = !tile.sorted_input;
  down.features = down_features(problem.hidden_size, tile.features);
  if (!problem.activation.gated) up = {.features = 128, .stages = 6, .gathers = true};
  return {.tokens = tile.tokens, .up = up, .down = down};
}

bool tile_sm90_common(const activation::Activation& activation) {
  return activation.fused != activation::FusedForm::kNone;
}

std::string to_string(const TilePlan& plan) {
  return std::to_string(plan.tokens) + " tokens, up " + to_string(plan.up) + ", down " +
         to_string(plan.down);
}

int32_t token_tiles_of_group(const GroupShape& shape, const cuda::DeviceInfo& device) {
  const int64_t blocks = std::max(device.multiprocessors, 1);
  int32_t best = 4;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int32_t candidate : {4, 8, 16, 32}) {
    const int64_t rows = int64_t{candidate} * shape.tile_tokens;
    // A group's rows stay in a third of L2 while all features pass by.
    if (candidate > 4 && rows * shape.depth_bytes > device.l2_bytes / 3) break;
    const int64_t read = rows + (blocks + candidate - 1) / candidate * shape.tile_features;
    if (read < least) {
      least = read;
      best = candidate;
    }
  }
  return best;
}

}  // namespace conclave::inline v0::experts
