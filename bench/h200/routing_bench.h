// Measures routing alone: logits to ids, weights and the permutation.
#pragma once

#include "support/cuda/cuda_problem.h"

#include "conclave/spec.h"

#include <cstdint>
#include <string>

namespace conclave::bench {

// The router of the model family that the case is named after.
RouterSpec router_of(const std::string& case_name);

struct RoutingMeasurement {
  double microseconds = 0;
  bool is_right = false;  // ids and their order equal the host router's, rows are sorted by expert
};
// Uses the case's experts and tokens on random logits. Returns the median over graphs of many
// launches, so that the start of a graph does not count.
RoutingMeasurement measure_routing(const std::string& case_name,
                                   const testing::CudaProblemOptions& options, int32_t replays);

}  // namespace conclave::bench
