#include "experts/cuda/sm90/tile_bytes/tile_bytes.h"

#include "core/checked.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "quant/gpu_rows.h"

#include <fmt/format.h>

#include <array>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kAlignment = 256;
constexpr DeviceTile tile_of(int32_t stages) {
  return {.tokens = 256,
          .features = 256,
          .depth = 128,
          .stages = stages,
          .cluster = 2,
          .sorted_input = true};
}
constexpr std::array kTiles = {tile_of(4)};
constexpr std::array kTilesOfLanes = {tile_of(3)};

// Whether e5m2 holds all weights of a matrix, but for one power of two.
Support has_weights_of_e5m2(const ExpertsProblem& problem) {
  if (factor_form(problem) != FactorForm::kExact || !has_scales_of_powers(problem)) {
    return Support::no("takes e2m1 codes with a scale of a power of two for 32 columns");
  }
  if (problem.scale_span <= kMostNearSpan) return Support::yes();
  return Support::no(
      fmt::format("decodes weights to e5m2, and so takes scales of a matrix within 2^{} of its "
                  "largest; found one at 2^-{} of it",
                  kMostNearSpan, problem.scale_span));
}

}  // namespace

Support tile_fp8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kF8E4M3);
}
Support tile_int8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kI8);
}

Support tile_fp4_fp8_supports(const ExpertsProblem& problem) {
  if (Support hopper = is_hopper(problem.gpu()); !hopper) return hopper;
  if (Support weights = has_weights_of_e5m2(problem); !weights) return weights;
  const QuantSpec& quant = problem.quant;
  if (quant.activations == ActivationScale::kNone) return Support::no("takes rows of e4m3");
  if (Support rows = quant::code_rows_support(problem.weight_dtype, quant); !rows) return rows;
  if (quant.has_column_factors) return Support::no("takes rows without factors of columns");
  if (problem.hidden_size % kWordColumns == 0 && problem.intermediate_size % kWordColumns == 0) {
    return Support::yes();
  }
  return Support::no(fmt::format("takes rows of a multiple of {} columns", kWordColumns));
}

std::span<const DeviceTile> tile_bytes_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }
std::span<const DeviceTile> tile_fp4_fp8_tiles(const ExpertsProblem& /*problem*/) {
  return kTilesOfLanes;
}

TileBytesWorkspace tile_bytes_workspace(const ExpertsProblem& problem, int64_t rows) {
  TileBytesWorkspace layout;
  layout.code_stride = round_up(problem.intermediate_size, 16);
  if (problem.quant.activations == ActivationScale::kGroup) {
    layout.scale_groups = ceil_div(problem.intermediate_size, kScaleGroup);
  } else if (problem.quant.activations == ActivationScale::kToken) {
    layout.scale_groups = 1;
  }
  layout.scale_stride = round_up(rows, 4);
  layout.down_tickets = layout.tickets + 16;
  layout.ended = layout.down_tickets + 16;
  layout.codes = static_cast<size_t>(kAlignment);
  int64_t end = kAlignment + round_up(rows * layout.code_stride, kAlignment);
  layout.scales = static_cast<size_t>(end);
  end += round_up(layout.scale_stride * layout.scale_groups * int64_t{sizeof(float)}, kAlignment);
  layout.values = static_cast<size_t>(end);
  if (problem.quant.activations == ActivationScale::kToken) {
    end += rows * layout.code_stride * int64_t{sizeof(float)};
  }
  layout.bytes = static_cast<size_t>(end);
  return layout;
}

size_t tile_bytes_memory(const ExpertsProblem& problem, int64_t tokens) {
  return tile_bytes_workspace(problem, tokens * problem.top_k).bytes;
}

int32_t tile_bytes_group(int64_t feature_tiles, int64_t depth, int64_t l2_bytes) {
  constexpr int64_t kTileRows = 256;  // token rows or weight rows
  // Beside the weights, rows and results pass through L2.
  if (feature_tiles * kTileRows * depth <= l2_bytes / 4) return 1;
  // 66 clusters then have eight token tiles and eight feature tiles at one time, which is the least
  // to read. The rows of a group stay in L2 while all of the weights pass by.
  int32_t tiles = 8;
  while (tiles > 1 && tiles * kTileRows * depth > l2_bytes / 3) tiles /= 2;
  return tiles;
}

}  // namespace conclave::inline v0::experts
