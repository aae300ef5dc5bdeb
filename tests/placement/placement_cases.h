// Sizes that placement tests iterate over, and the placement without replicas.
#pragma once

#include "conclave/error.h"
#include "conclave/placement.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::testing {

struct PlacementCase {
  int64_t num_experts = 1;
  int32_t num_ranks = 1;
  PlacementStrategy strategy = PlacementStrategy::kLinear;
};

inline ExpertPlacement place(const PlacementCase& c) {
  return make_placement(c.num_experts, {.ep_size = c.num_ranks, .placement = c.strategy});
}

inline std::vector<PlacementCase> placement_cases() {
  std::vector<PlacementCase> cases;
  for (const int64_t experts : {1, 2, 3, 4, 7, 8, 9, 16, 17, 18, 32, 33, 64, 128, 513}) {
    for (const int32_t ranks : {1, 2, 3, 4, 8, 16, 40}) {
      cases.push_back({experts, ranks, PlacementStrategy::kLinear});
      cases.push_back({experts, ranks, PlacementStrategy::kRoundRobin});
    }
  }
  return cases;
}

inline std::string describe(const PlacementCase& c) {
  return "experts " + std::to_string(c.num_experts) + ", ranks " + std::to_string(c.num_ranks) +
         (c.strategy == PlacementStrategy::kLinear ? ", linear" : ", round-robin");
}

// The argument that an Error of kInvalidArgument names; "accepted" if nothing is thrown.
template <class Action>
std::string refused_argument(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kInvalidArgument ? error.detail().tensor : error.what();
  }
  return "accepted";
}

}  // namespace conclave::testing
