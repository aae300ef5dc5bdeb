// Row "cuda.stream_sm90": few rows per expert, limited by the rate at which weights come from
// memory. docs/architecture.md has the ladder it belongs to.
#pragma once

#include "experts/cuda/device_experts.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Hopper; bf16 or f16 weights; every activation, bias and size.
Support stream_sm90_supports(const ExpertsProblem& problem);
// Ordered from few token rows per tile to many. Every further tile of an expert reads the same
// weights again, so the best tile is the narrowest that holds the rows of most experts.
std::span<const DeviceTile> stream_sm90_tiles(const ExpertsProblem& problem);
// Elements from one intermediate row to the next, in the workspace.
int64_t stream_sm90_stride(const ExpertsProblem& problem);
size_t stream_sm90_bytes(const ExpertsProblem& problem, int64_t tokens);
std::unique_ptr<DeviceExpertsKernel> make_stream_sm90(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
