// Chunks of messages that are longer than their slots: where they lie, and what counts them.
#pragma once

#include "comm/nccl/window_parts.cuh"

#include <cstdint>

namespace conclave::inline v0::comm::window {

// Chunk `number` of this block's lane.
__device__ __forceinline__ Piece chunk_of(const WindowParams& params, int64_t bytes,
                                          int64_t number) {
  if (is_short(params, bytes)) return {0, 0};
  const int64_t lane = lane_bytes_of(bytes, params.lane_bits);
  const int64_t size = chunk_bytes_of(params.slot_bytes, params.lane_bits);
  const int64_t first = lane * blockIdx.x;
  const int64_t end = first + lane < bytes ? first + lane : bytes;
  const int64_t begin = first + size * number;
  return {begin, begin + size < end ? size : end - begin};
}
// Its place in a slot.
__device__ __forceinline__ int64_t chunk_place(const WindowParams& params, int64_t number) {
  return (blockIdx.x * kChunksInFlight + number % kChunksInFlight) *
         chunk_bytes_of(params.slot_bytes, params.lane_bits);
}
// So many chunks of an epoch; those of later epochs are more.
__device__ __forceinline__ uint64_t progress(uint32_t epoch, int64_t chunks) {
  return static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(chunks);
}

}  // namespace conclave::inline v0::comm::window
