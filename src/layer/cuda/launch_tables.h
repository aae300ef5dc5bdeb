// Chooses, by the number of tokens, the kernels beside the experts' own: gate products, and the
// launches that route, check and group.
#pragma once

#include "layer/cuda/plan.h"
#include "layer/cuda/weights.h"

#include <cstdint>

namespace conclave::inline v0 {

// Fills the plan's tables, whose parts are planned, and lists every alternative in its summary.
void choose_launches(CudaPlan& plan);
// Lets the chosen kernels have what they need on the current device.
void prepare_launches(const CudaPlan& plan, const CudaWeights& weights);

// The grouping of a call's routed rows.
dispatch::GroupLaunches routed_launches(const CudaPlan& plan, int64_t tokens);
// The kernel of a gate product of the plan.
inline gemm::GateKernel gate_kernel(const std::vector<gemm::GateRung>& ladder, int64_t tokens) {
  return rung_for(ladder, tokens).row->kernel;
}

}  // namespace conclave::inline v0
