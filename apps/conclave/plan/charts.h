// Drawings of a plan, as SVG for a page whose style sheet gives colours.
#pragma once

#include "plan/planner.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

// A row of fields for each layer: the stronger the colour, the further a load is from the mean,
// which is 1. `subject` names the columns: "expert", "rank"; `columns` is how many they stand for.
std::string load_map(const std::vector<std::vector<double>>& loads,
                     const std::vector<int64_t>& layers, std::string_view subject, int64_t columns);

// Bars of compute and exchange for each strategy.
std::string time_chart(const std::vector<const StrategyPlan*>& rows);

// The mean, the 95th percentile and the worst balance of each strategy.
std::string balance_chart(const std::vector<const StrategyPlan*>& rows);

}  // namespace conclave::tool
