#include "experts/cuda/sm90/tile_fp8/tile_fp8.h"

#include "core/checked.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/hopper_support.h"

#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kAlignment = 256;
constexpr std::array kTiles = {
    DeviceTile{.tokens = 256,
               .features = 256,
               .depth = 128,
               .stages = 4,
               .cluster = 2,
               .sorted_input = true},
};

Support supports_quant(const QuantSpec& quant) {
  const bool rows = quant.activations == ActivationScale::kToken ||
                    quant.activations == ActivationScale::kTensorStatic;
  switch (quant.weights) {
    case WeightScale::kBlock:
      if (quant.block_rows != kScaleGroup || quant.block_cols != kScaleGroup) {
        return Support::no("takes weight blocks of 128x128; found " +
                           std::to_string(quant.block_rows) + "x" +
                           std::to_string(quant.block_cols));
      }
      if (quant.activations != ActivationScale::kGroup) {
        return Support::no("takes block weights with a scale per 128 activations only");
      }
      return Support::yes();
    case WeightScale::kChannel:
    case WeightScale::kTensor:
      if (!rows) return Support::no("takes row weights with one scale per activation row only");
      return Support::yes();
    case WeightScale::kNone:
      break;
  }
  return Support::no("takes weights with scales");
}

}  // namespace

Support tile_fp8_supports(const ExpertsProblem& problem) {
  Support support = supports_on_hopper(problem, {DType::kF8E4M3});
  if (!support) return support;
  return supports_quant(problem.quant);
}

std::span<const DeviceTile> tile_fp8_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }

TileFp8Workspace tile_fp8_workspace(const ExpertsProblem& problem, int64_t rows) {
  TileFp8Workspace layout;
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

size_t tile_fp8_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return tile_fp8_workspace(problem, tokens * problem.top_k).bytes;
}

}  // namespace conclave::inline v0::experts
