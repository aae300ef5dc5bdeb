// A plan as a table and as JSON. docs/cli.md has the schema.
#pragma once

#include "output/table.h"
#include "plan/planner.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>

namespace conclave::tool {

nlohmann::ordered_json plan_json(const PlannedModel& model, const ClusterPlan& plan);

// `most_rows` of each number of tokens are shown.
void print_plan(const PlannedModel& model, const ClusterPlan& plan, OutputFormat format,
                int64_t most_rows, std::FILE* out);

// Returns "bf16" or "e4m3".
const char* dispatch_name(const PlanRequest& request);
const char* combine_name(const PlanRequest& request);

}  // namespace conclave::tool
