#include "experts/cuda/sm90/stream/adapted_offsets.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_in_order_with_offsets(const DeviceTile& tile) {
  return find_adapted_with_offsets<codes_with_offsets(4, false)>(tile);
}

AdaptedCodesPair find_adapted_in_order_with_steps(const DeviceTile& tile) {
  return find_adapted_with_offsets<codes_with_offsets(4, true)>(tile);
}

}  // namespace conclave::inline v0::experts::stream
