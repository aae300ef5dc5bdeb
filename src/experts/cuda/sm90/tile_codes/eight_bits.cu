#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_of_8_bits(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 8, .steps_of_sum = 1, .rounded = true}>(tile);
}

KernelPair find_kernels_of_8_bits_with_steps(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 8, .steps_of_sum = 1, .rounded = true, .steps = true}>(tile);
}

KernelPair find_kernels_of_8_bit_rows(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 8, .rounded = true, .whole_rows = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes
