#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_of_steps(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 8, .steps_of_sum = 1, .steps = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream
