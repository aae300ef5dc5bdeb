// Rows "cuda.stream_fp8_sm90" and "cuda.stream_int8_sm90": the counterparts of stream.h for weights
// and rows of e4m3, and of int8.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Hopper; one scale per 128x128 block of weights and per 128 columns of a row, or one scale per
// weight row and per row (or for all rows); every activation, bias and size.
Support stream_fp8_supports(const ExpertsProblem& problem);
Support stream_int8_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> stream_bytes_tiles(const ExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_stream_fp8(const ExpertsProblem& problem,
                                                     const DeviceExperts& weights,
                                                     const DeviceTile& tile);
std::unique_ptr<DeviceExpertsKernel> make_stream_int8(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile);

// Layout of the intermediate in a workspace, in bytes; each part from the codes on is 256-byte
// aligned.
struct StreamBytesWorkspace {
  int64_t stride = 0;  // elements per row of codes and values: I rounded up to 16
  size_t codes = 0;    // [rows, stride], behind the counters
  size_t scales = 0;   // float32: [ceil(I / 128), rows] with block scales, [rows] with dynamic row
                       // scales
  size_t values = 0;   // [rows, stride] float32, only with dynamic row scales
  size_t bytes = 0;
};
StreamBytesWorkspace stream_bytes_workspace(const ExpertsProblem& problem, int64_t rows);
size_t stream_bytes_memory(const ExpertsProblem& problem, int64_t tokens);

}  // namespace conclave::inline v0::experts
