#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_of_pairs(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .steps_of_sum = 2, .in_pairs = true, .rounded = true}>(tile);
}

KernelPair find_kernels_of_pairs_in_terms(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 4, .steps_of_sum = 4, .terms = 2, .in_pairs = true, .rounded = true}>(tile);
}

KernelPair find_kernels_of_rows_in_pairs(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .in_pairs = true, .rounded = true, .whole_rows = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes
