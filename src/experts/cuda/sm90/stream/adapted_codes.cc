#include "experts/cuda/sm90/stream/adapted_codes.h"

#include "experts/cuda/sm90/stream/stream_codes.h"

#include <array>

namespace conclave::inline v0::experts {
namespace {

// Every form of codes has kernels for these; how many stages they have depends on the form.
constexpr std::array kTiles = {DeviceTile{.tokens = 16, .features = 128, .depth = 128},
                               DeviceTile{.tokens = 64, .features = 128, .depth = 128}};

}  // namespace

Support adapted_codes_supports(const ExpertsProblem& problem) {
  if (problem.quant.has_column_factors) return Support::no("takes no factors of columns");
  return stream_codes_supports(problem);
}

std::span<const DeviceTile> adapted_codes_tiles(const ExpertsProblem& /*problem*/) {
  return kTiles;
}

}  // namespace conclave::inline v0::experts
