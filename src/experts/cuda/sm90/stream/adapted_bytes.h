// "cuda.stream_fp8_sm90" and "cuda.stream_int8_sm90" for rows that have adapters.
#pragma once

#include "experts/cuda/adapters/adapter_kernel.h"

#include <cstddef>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

std::span<const DeviceTile> adapted_bytes_tiles(const ExpertsProblem& problem);
size_t adapted_bytes_memory(const ExpertsProblem& problem, int64_t tokens);
std::unique_ptr<AdapterKernel> make_adapted_fp8(const ExpertsProblem& problem,
                                                const DeviceExperts& weights,
                                                const DeviceTile& tile);
std::unique_ptr<AdapterKernel> make_adapted_int8(const ExpertsProblem& problem,
                                                 const DeviceExperts& weights,
                                                 const DeviceTile& tile);

// Layout of the intermediate in a workspace, in bytes; each part is 256-byte aligned. Activated
// rows are float32 until they are quantised, whatever their scales.
struct AdaptedBytesWorkspace {
  int64_t stride = 0;  // elements per row of codes and values
  size_t codes = 0;    // as StreamBytesWorkspace has these
  size_t scales = 0;
  size_t values = 0;
  size_t bytes = 0;
};
AdaptedBytesWorkspace adapted_bytes_workspace(const ExpertsProblem& problem, int64_t rows);

}  // namespace conclave::inline v0::experts
