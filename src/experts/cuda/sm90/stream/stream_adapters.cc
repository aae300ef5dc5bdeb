#include "experts/cuda/sm90/stream/stream_adapters.h"

#include "experts/cuda/sm90/stream/stream.h"

#include <algorithm>

namespace conclave::inline v0::experts {

Support stream_adapters_supports(const ExpertsProblem& problem) {
  return stream_sm90_supports(problem);
}

// Those of stream.cc whose rows are gathered and whose sums leave registers for terms.
std::span<const DeviceTile> stream_adapters_tiles(const ExpertsProblem& problem) {
  constexpr int32_t kMostTokens = 64;
  const std::span<const DeviceTile> all = stream_sm90_tiles(problem);
  const auto end =
      std::ranges::find_if(all, [](const DeviceTile& tile) { return tile.tokens > kMostTokens; });
  return {all.begin(), end};
}

}  // namespace conclave::inline v0::experts
