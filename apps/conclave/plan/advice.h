// A plan in words: what to take, why, and what the figures rest on.
#pragma once

#include "plan/planner.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Returns "64 tokens a GPU", or "the batches of the trace".
std::string tokens_text(int64_t tokens);

// Sentences without a full stop: the hot set, the best for latency and for throughput, whether
// replicas pay, or what nothing fits for.
std::vector<std::string> advice(const PlannedModel& model, const ClusterPlan& plan);

// Says what is measured, what is assumed and what is left out.
std::vector<std::string> basis(const PlannedModel& model, const ClusterPlan& plan);

}  // namespace conclave::tool
