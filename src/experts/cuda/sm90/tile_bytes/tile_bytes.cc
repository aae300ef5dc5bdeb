#include "experts/cuda/sm90/tile_bytes/tile_bytes.h"

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

}  // namespace

Support tile_fp8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kF8E4M3);
}
Support tile_int8_supports(const ExpertsProblem& problem) {
  return supports_bytes(problem, DType::kI8);
}

std::span<const DeviceTile> tile_bytes_tiles(const ExpertsProblem& /*problem*/) { return kTiles; }

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

}  // namespace conclave::inline v0::experts
