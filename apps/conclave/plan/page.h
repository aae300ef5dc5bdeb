// A plan as one page that needs nothing else: text, tables, heat maps and charts.
#pragma once

#include "plan/planner.h"

#include <string>

namespace conclave::tool {

std::string plan_page(const PlannedModel& model, const ClusterPlan& plan);

}  // namespace conclave::tool
