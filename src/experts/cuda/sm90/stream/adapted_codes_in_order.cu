#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_in_order(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 2, .in_order = true}>(tile);
}

AdaptedCodesPair find_adapted_of_long_sums(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 8, .in_order = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream
