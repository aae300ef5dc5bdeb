// Row "cuda.stream_fp8_sm90": stream_sm90.h for e4m3 weights and rows.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Hopper; weights scaled a 128x128 block with rows scaled a 128 columns, or a scale a weight row
// with one a row; every activation, bias and size.
Support stream_fp8_supports(const DeviceExpertsProblem& problem);
std::span<const DeviceTile> stream_fp8_tiles(const DeviceExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_stream_fp8(const DeviceExpertsProblem& problem,
                                                     const DeviceExperts& weights,
                                                     const DeviceTile& tile);

// Where the intermediate lies in a workspace, in bytes; each part is 256-byte aligned.
struct StreamFp8Workspace {
  int64_t stride = 0;    // codes of a row, and float32 values: I rounded up to 16
  size_t hand_over = 0;  // what up and down tell each other
  size_t codes = 0;      // [rows, stride] e4m3
  size_t scales = 0;  // [ceil(I / 128), rows] float32 of block scales; [rows] of dynamic row ones
  size_t values = 0;  // [rows, stride] float32, of dynamic row scales only
  size_t bytes = 0;
};
StreamFp8Workspace stream_fp8_workspace(const DeviceExpertsProblem& problem, int64_t rows);

}  // namespace conclave::inline v0::experts
