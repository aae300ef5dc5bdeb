#include "experts/cuda/sm90/stream/rounded_signed_bytes.cuh"
#include "experts/cuda/sm90/tile_codes/kernels.cuh"
#include "experts/cuda/sm90/tile_codes/signed_bytes.h"

namespace conclave::inline v0::experts::tile_codes {

using stream::Codes;

KernelPair find_kernels_of_signed_bytes(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 8, .steps_of_sum = 1, .zeros = true, .in_order = true, .rounded = true}>(tile);
}

KernelPair find_shifted_kernels_of_8_bits(const DeviceTile& tile) {
  return find_tile<Codes{
      .bits = 8, .steps_of_sum = 1, .offsets = true, .in_order = true, .rounded = true}>(tile);
}

KernelPair find_kernels_of_rows_of_signed_bytes(const DeviceTile& tile) {
  return find_tile<Codes{.bits = 8, .in_order = true, .rounded = true, .whole_rows = true}>(tile);
}

}  // namespace conclave::inline v0::experts::tile_codes
