// "cuda.stream_sm90" for rows that have adapters: their terms join the sums of each product.
#pragma once

#include "experts/cuda/adapters/adapter_kernel.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

Support stream_adapters_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> stream_adapters_tiles(const ExpertsProblem& problem);
// Defined in the .cu, which builds with CUDA only.
std::unique_ptr<AdapterKernel> make_stream_adapters(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
