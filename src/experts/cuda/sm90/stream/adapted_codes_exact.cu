#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_of_powers(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 2, .exact = ExactScales::kPowers}>(tile);
}

AdaptedCodesPair find_adapted_of_floats(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 1, .exact = ExactScales::kFloats}>(tile);
}

}  // namespace conclave::inline v0::experts::stream
