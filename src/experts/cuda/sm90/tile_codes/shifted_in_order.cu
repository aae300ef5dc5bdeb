#include "experts/cuda/sm90/tile_codes/kernels.cuh"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_in_order_with_zeros(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 4, .steps_of_sum = 2, .zeros = true, .in_order = true, .rounded = true}>(tile);
}

KernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 4, .steps_of_sum = 2, .offsets = true, .in_order = true, .rounded = true}>(tile);
}

KernelPair find_kernels_of_rows_in_order(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 4, .in_order = true, .rounded = true, .whole_rows = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes
