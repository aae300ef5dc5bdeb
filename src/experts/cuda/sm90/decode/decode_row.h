// Row "cuda.decode_sm90" of the catalog.
#pragma once

#include "experts/catalog.h"
#include "experts/cuda/device_experts.h"
#include "experts/cuda/one_launch.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace conclave::inline v0::experts {

Support decode_supports(const ExpertsProblem& problem);
OneLaunchReach decode_reach(const ExpertsProblem& problem);
size_t decode_bytes(const ExpertsProblem& problem, int64_t tokens);  // the same for all
std::unique_ptr<OneLaunchKernel> make_decode(const ExpertsProblem& problem,
                                             const DeviceExperts& weights);

}  // namespace conclave::inline v0::experts
