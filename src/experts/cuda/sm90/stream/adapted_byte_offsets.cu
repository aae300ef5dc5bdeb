#include "experts/cuda/sm90/stream/adapted_byte_offsets.cuh"
#include "experts/cuda/sm90/stream/adapted_offsets.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_of_bytes_with_offsets(const DeviceTile& tile) {
  return find_adapted_with_offsets<codes_with_offsets(8, false)>(tile);
}

AdaptedCodesPair find_adapted_of_bytes_with_steps(const DeviceTile& tile) {
  return find_adapted_with_offsets<codes_with_offsets(8, true)>(tile);
}

}  // namespace conclave::inline v0::experts::stream
