#include "experts/cuda/sm90/stream/adapted_codes.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_of_pairs(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 2, .in_pairs = true}>(tile);
}

AdaptedCodesPair find_adapted_of_wide_pairs(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 4, .in_pairs = true}>(tile);
}

AdaptedCodesPair find_adapted_of_pairs_in_terms(const DeviceTile& tile) {
  return find_adapted<Codes{.bits = 4, .steps_of_sum = 4, .terms = 2, .in_pairs = true}>(tile);
}

}  // namespace conclave::inline v0::experts::stream
