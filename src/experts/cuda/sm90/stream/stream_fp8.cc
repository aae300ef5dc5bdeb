#include "experts/cuda/sm90/stream/stream_fp8.h"

#include "core/checked.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/hopper_support.h"

#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

// Tiles of the kernels with a gate; stream_fp8.cu has one for each of these.
constexpr std::array kTiles = {
    DeviceTile{.tokens = 16, .features = 256, .depth = 128, .stages = 6},
    DeviceTile{.tokens = 32, .features = 256, .depth = 128, .stages = 6},
    DeviceTile{.tokens = 64, .features = 256, .depth = 128, .stages = 5},
    DeviceTile{.tokens = 80, .features = 256, .depth = 128, .stages = 5},
};

constexpr int64_t kAlignment = 256;
size_t aligned(size_t bytes) {
  return static_cast<size_t>(round_up(static_cast<int64_t>(bytes), kAlignment));
}

Support supports_scales(const QuantSpec& quant) {
  if (quant.weights == WeightScale::kBlock) {
    if (quant.block_rows != kScaleGroup || quant.block_cols != kScaleGroup) {
      return Support::no("takes weight blocks of 128x128; found " +
                         std::to_string(quant.block_rows) + "x" + std::to_string(quant.block_cols));
    }
    if (quant.activations != ActivationScale::kGroup) {
      return Support::no(
          "takes block-scaled weights only with one activation scale per 128 columns");
    }
    return Support::yes();
  }
  if (quant.weights == WeightScale::kNone) return Support::no("takes weights with scales");
  if (quant.activations != ActivationScale::kToken &&
      quant.activations != ActivationScale::kTensorStatic) {
    return Support::no("row-scaled weights need one activation scale per row, or a constant one");
  }
  return Support::yes();
}

}  // namespace

Support stream_fp8_supports(const ExpertsProblem& problem) {
  Support support = supports_on_hopper(problem, {DType::kF8E4M3});
  if (!support) return support;
  return supports_scales(problem.quant);
}

std::span<const DeviceTile> stream_fp8_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }

StreamFp8Workspace stream_fp8_workspace(const ExpertsProblem& problem, int64_t rows) {
  StreamFp8Workspace layout;
  layout.stride = round_up(problem.intermediate_size, 16);
  int64_t scales = 0;
  if (problem.quant.activations == ActivationScale::kGroup) {
    scales = ceil_div(problem.intermediate_size, kScaleGroup);
  } else if (problem.quant.activations == ActivationScale::kToken) {
    scales = 1;
  }
  const auto codes = static_cast<size_t>(rows * layout.stride);
  layout.codes = kAlignment;
  layout.scales = layout.codes + aligned(codes);
  layout.values = layout.scales + aligned(static_cast<size_t>(rows * scales) * sizeof(float));
  layout.bytes = layout.values;
  if (problem.quant.activations == ActivationScale::kToken) layout.bytes += codes * sizeof(float);
  return layout;
}

size_t stream_fp8_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return stream_fp8_workspace(problem, tokens * problem.top_k).bytes;
}

}  // namespace conclave::inline v0::experts
