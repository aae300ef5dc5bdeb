// The expert MLPs on the GPU as plainly as they can be written: any type, any size, one warp per
// output element. Faster kernels are compared with it, and it runs where none of them fits.
#pragma once

#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/cuda/device_experts.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

Support reference_supports(const ExpertsProblem& problem);
size_t reference_bytes(const ExpertsProblem& problem, int64_t tokens);
std::span<const DeviceTile> reference_tiles(const ExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_reference(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile);
// The same for rows that have adapters.
std::unique_ptr<AdapterKernel> make_adapted_reference(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile);

namespace detail {
// Defined in the .cu: enqueues up, the intermediate's quantisation if there is one, and down.
void run_reference(const ExpertsProblem& problem, const DeviceExperts& weights,
                   const DeviceExpertsCall& call, CUstream_st* stream);
void run_adapted_reference(const ExpertsProblem& problem, const DeviceExperts& weights,
                           const AdaptedCall& call, CUstream_st* stream);
}  // namespace detail

}  // namespace conclave::inline v0::experts
