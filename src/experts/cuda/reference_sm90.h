// The expert MLPs on the GPU as plainly as they can be written: any type, any size, a warp an
// output element. What faster kernels are compared with, and what serves where none of them fits.
#pragma once

#include "experts/cuda/device_experts.h"

namespace conclave::inline v0::experts {

Support reference_supports(const DeviceExpertsProblem& problem);
std::span<const DeviceTile> reference_tiles(const DeviceExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_reference(const DeviceExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile);

namespace detail {
// The twin of the .cu: enqueues up, the intermediate's quantisation where there is one, down.
void run_reference(const DeviceExpertsProblem& problem, const DeviceExperts& weights,
                   const DeviceExpertsCall& call, CUstream_st* stream);
}  // namespace detail

}  // namespace conclave::inline v0::experts
