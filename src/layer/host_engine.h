// The CPU adds to a layer its plan, packed weights and stages.
#pragma once

#include "layer/engine.h"

namespace conclave::inline v0 {

std::unique_ptr<Engine> make_host_engine(const EngineRequest& request, const WeightSource& source);
Plan plan_host_engine(const EngineRequest& request);

}  // namespace conclave::inline v0
