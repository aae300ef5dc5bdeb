// "cuda.tile_fp8_sm90": e4m3 weights and activations with many rows per expert. Two products of
// 128-token tiles, compute bound. Planning only; the kernel is in tile_fp8_sm90.cuh.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Where the intermediate rows lie in a workspace. Bytes; every part is 256-byte aligned.
struct TileFp8Workspace {
  int64_t code_stride = 0;   // bytes, and elements of a float32 row: I rounded up to 16
  int64_t scale_groups = 0;  // ceil(I / 128) of the block form, 1 of dynamic row scales, else 0
  int64_t scale_stride = 0;  // elements: rows rounded up to 16 bytes
  size_t tickets = 0;        // of a counter that hands out tiles of up
  size_t down_tickets = 0;   // of down
  size_t ended = 0;          // of a count of blocks
  size_t codes = 0;          // [rows, code_stride] e4m3
  size_t scales = 0;         // [scale_groups, scale_stride] float32
  size_t values = 0;         // [rows, code_stride] float32, of dynamic row scales only
  size_t bytes = 0;
};
TileFp8Workspace tile_fp8_workspace(const DeviceExpertsProblem& problem, int64_t rows);

Support tile_fp8_supports(const DeviceExpertsProblem& problem);
std::span<const DeviceTile> tile_fp8_tiles(const DeviceExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_tile_fp8(const DeviceExpertsProblem& problem,
                                                   const DeviceExperts& weights,
                                                   const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
