// Runs the two products of experts whose weights are codes, on whichever kernels multiply them.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/cuda/sm90/kernel_names.h"
#include "experts/cuda/sm90/stream/launch.h"

#include <memory>

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_codes_kernel(
    const KernelNames& names, const stream::KernelPairOf<stream::CodedParams>& kernels,
    const ExpertsProblem& problem, const DeviceExperts& weights, const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
