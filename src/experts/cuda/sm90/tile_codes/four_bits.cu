#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_of_4_bits(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .steps_of_sum = 1, .rounded = true}>(tile);
}

KernelPair find_shifted_kernels_of_4_bits(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .steps_of_sum = 1, .offsets = true, .rounded = true}>(tile);
}

KernelPair find_kernels_of_two_terms(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .steps_of_sum = 1, .terms = 2, .rounded = true}>(tile);
}

KernelPair find_kernels_of_4_bit_rows(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .rounded = true, .whole_rows = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes
