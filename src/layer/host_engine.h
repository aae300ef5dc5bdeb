// The CPU adds to a layer its plan, packed weights and stages.
#pragma once

#include "layer/engine.h"

namespace conclave::inline v0 {

std::unique_ptr<Engine> make_host_engine(const EngineRequest& request, const WeightSource& source);
// Its weights are other ranks', or this rank's on other ranks.
std::unique_ptr<Engine> make_unfilled_host_engine(const EngineRequest& request);
Plan plan_host_engine(const EngineRequest& request);

}  // namespace conclave::inline v0
