// Routing alone: logits to ids, weights and the permutation.
#pragma once

#include "support/cuda/cuda_problem.h"

namespace conclave::bench {

struct RoutingMeasurement {
  double microseconds = 0;
  bool is_right = false;  // every token chose the batch's experts, every expert has its rows
};
RoutingMeasurement measure_routing(const testing::CudaProblem& problem, int32_t replays);

}  // namespace conclave::bench
