#include "experts/cuda/sm90/stream/stream_bytes.h"

#include "core/checked.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "experts/cuda/sm90/stream/counters.h"

#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

// Tiles of the kernels with a gate; stream_bytes_kernel.cuh has one for each of these.
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

}  // namespace

Support stream_fp8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kF8E4M3);
}
Support stream_int8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kI8);
}

std::span<const DeviceTile> stream_bytes_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }

StreamBytesWorkspace stream_bytes_workspace(const ExpertsProblem& problem, int64_t rows) {
  StreamBytesWorkspace layout;
  layout.stride = round_up(problem.intermediate_size, 16);
  int64_t scales = 0;
  if (problem.quant.activations == ActivationScale::kGroup) {
    scales = ceil_div(problem.intermediate_size, kScaleGroup);
  } else if (problem.quant.activations == ActivationScale::kToken) {
    scales = 1;
  }
  const auto codes = static_cast<size_t>(rows * layout.stride);
  layout.codes = stream::kCounterBytes;
  layout.scales = layout.codes + aligned(codes);
  layout.values = layout.scales + aligned(static_cast<size_t>(rows * scales) * sizeof(float));
  layout.bytes = layout.values;
  if (problem.quant.activations == ActivationScale::kToken) layout.bytes += codes * sizeof(float);
  return layout;
}

size_t stream_bytes_memory(const ExpertsProblem& problem, int64_t tokens) {
  return stream_bytes_workspace(problem, tokens * problem.top_k).bytes;
}

}  // namespace conclave::inline v0::experts
