#include "experts/cuda/sm90/stream/stream.h"

#include "experts/cuda/sm90/hopper_support.h"
#include "experts/cuda/sm90/stream/counters.h"

#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

// Stages fill the 227 KiB of shared memory that a block may have; stream.cu has a kernel for
// each of these.
constexpr std::array kTiles = {
    DeviceTile{.tokens = 16, .features = 128, .depth = 256, .stages = 6},
    DeviceTile{.tokens = 32, .features = 128, .depth = 256, .stages = 5},
    DeviceTile{.tokens = 64, .features = 128, .depth = 256, .stages = 4},
    DeviceTile{.tokens = 96, .features = 256, .depth = 128, .stages = 5},
    DeviceTile{.tokens = 160, .features = 256, .depth = 128, .stages = 4, .sorted_input = true},
};

}  // namespace

Support stream_sm90_supports(const ExpertsProblem& problem) {
  return supports_on_hopper(problem, {DType::kBF16, DType::kF16});
}

std::span<const DeviceTile> stream_sm90_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }

int64_t stream_sm90_stride(const ExpertsProblem& problem) {
  return (problem.intermediate_size + 7) / 8 * 8;
}

size_t stream_sm90_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return static_cast<size_t>(stream::kCounterBytes + tokens * problem.top_k *
                                                         stream_sm90_stride(problem) *
                                                         byte_size(problem.weight_dtype));
}

}  // namespace conclave::inline v0::experts
