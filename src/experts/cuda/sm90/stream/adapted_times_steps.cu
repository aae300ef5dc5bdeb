#include "experts/cuda/sm90/stream/adapted_offsets.cuh"
#include "experts/cuda/sm90/stream/adapted_times_steps.h"
#include "experts/cuda/sm90/stream/step_tiles.cuh"

namespace conclave::inline v0::experts::stream {

AdaptedCodesPair find_adapted_times_steps(const DeviceTile& tile) {
  return find_adapted<codes_times_steps(false)>(tile);
}

AdaptedCodesPair find_adapted_times_offset_steps(const DeviceTile& tile) {
  return find_adapted_with_offsets<codes_times_steps(true)>(tile);
}

}  // namespace conclave::inline v0::experts::stream
