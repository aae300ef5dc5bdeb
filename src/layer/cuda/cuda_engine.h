// A layer on CUDA: plan, weights and kernels in device memory, work enqueued on the caller's
// stream.
#pragma once

#include "layer/cuda/cuda_runtime.h"
#include "layer/engine.h"

namespace conclave::inline v0 {

std::unique_ptr<Engine> make_cuda_engine(const EngineRequest& request, const WeightSource& source);
std::vector<TuningEntry> cuda_candidates(const EngineRequest& request, int64_t tokens);
Plan plan_cuda_engine(const EngineRequest& request);

}  // namespace conclave::inline v0
