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

// The same with more slots than a warp has lanes: k from 33 to all experts, of at most 1024
// columns.
inline MoeSpec random_wide_topk_spec(std::mt19937& generator) {
  constexpr int64_t kLeastTopK = 33;
  constexpr int64_t kMostColumns = 1024;
  MoeSpec spec = random_topk_spec(generator);
  const RouterSpec& router = spec.router;
  const auto pick = [&](int64_t count) {
    return static_cast<int64_t>(generator() % static_cast<uint32_t>(count));
  };
  const int64_t least = (kLeastTopK + router.topk_groups - 1) / router.topk_groups;
  const int64_t most = (kMostColumns - spec.num_zero_experts) / router.num_groups;
  // Most draws are small, since these are the most different.
  const int64_t size = least + pick(pick(4) == 0 ? most - least + 1 : 10);
  spec.num_experts = router.num_groups * size;
  const int64_t usable = router.topk_groups * size + spec.num_zero_experts;
  spec.top_k = pick(3) == 0 ? usable : kLeastTopK + pick(usable - kLeastTopK + 1);
  return spec;
}

}  // namespace conclave::testing
