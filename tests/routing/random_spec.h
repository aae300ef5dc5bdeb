// Specs for router "topk" in the property tests, of the host and of the device.
#pragma once

#include "routing/routing_problem.h"

#include <random>

namespace conclave::testing {

// Draws a spec from everything that validate() accepts.
inline MoeSpec random_topk_spec(std::mt19937& generator) {
  MoeSpec spec = router_spec(1, 1, Renormalize::kNone);
  routing::find_router("topk")->draw(generator, spec);
  return spec;
}

}  // namespace conclave::testing
