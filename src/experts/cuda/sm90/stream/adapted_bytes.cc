#include "experts/cuda/sm90/stream/adapted_bytes.h"

#include "experts/cuda/sm90/stream/stream_bytes.h"

#include <algorithm>

namespace conclave::inline v0::experts {

// Those of stream_bytes.cc whose sums leave registers for terms.
std::span<const DeviceTile> adapted_bytes_tiles(const ExpertsProblem& problem) {
  constexpr int32_t kMostTokens = 32;
  const std::span<const DeviceTile> all = stream_bytes_tiles(problem);
  const auto end =
      std::ranges::find_if(all, [](const DeviceTile& tile) { return tile.tokens > kMostTokens; });
  return {all.begin(), end};
}

AdaptedBytesWorkspace adapted_bytes_workspace(const ExpertsProblem& problem, int64_t rows) {
  const StreamBytesWorkspace base = stream_bytes_workspace(problem, rows);
  const auto values = static_cast<size_t>(rows * base.stride) * sizeof(float);
  return {.stride = base.stride,
          .codes = base.codes,
          .scales = base.scales,
          .values = base.values,
          .bytes = base.values + values};
}

size_t adapted_bytes_memory(const ExpertsProblem& problem, int64_t tokens) {
  return adapted_bytes_workspace(problem, tokens * problem.top_k).bytes;
}

}  // namespace conclave::inline v0::experts
