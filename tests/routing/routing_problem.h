// Routing problems and the float64 oracle's answer, for the router tests.
#pragma once

#include "routing/router.h"
#include "support/executors.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {

struct RoutingResult {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t without_finite_logit = 0;
  friend bool operator==(const RoutingResult&, const RoutingResult&) = default;
};

inline MoeSpec router_spec(int64_t num_experts, int64_t top_k, Renormalize renormalize) {
  MoeSpec spec;
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  spec.router.renormalize = renormalize;
  return spec;
}

inline std::string describe(const MoeSpec& spec) {
  return "experts " + std::to_string(spec.num_experts) + ", top_k " + std::to_string(spec.top_k) +
         (spec.router.renormalize == Renormalize::kSum ? ", renormalised" : "");
}

inline RoutingResult route(const MoeSpec& spec, const std::vector<float>& logits,
                           Executor& executor) {
  const auto router = routing::router_catalog().find(spec.router.name, "router").make(spec);
  const int64_t tokens = static_cast<int64_t>(logits.size()) / spec.num_experts;
  RoutingResult result;
  result.ids.assign(static_cast<size_t>(tokens * spec.top_k), -77);
  result.weights.assign(result.ids.size(), -77.0F);
  const RouterStats stats = router->route(
      {.num_tokens = tokens, .num_experts = spec.num_experts, .logits = logits.data()},
      {.topk_ids = result.ids.data(), .topk_weights = result.weights.data()}, executor);
  result.without_finite_logit = stats.tokens_without_finite_logit;
  return result;
}

inline RoutingResult route(const MoeSpec& spec, const std::vector<float>& logits) {
  SerialExecutor executor;
  return route(spec, logits, executor);
}

inline RoutingResult oracle(const MoeSpec& spec, const std::vector<float>& logits) {
  const auto experts = static_cast<size_t>(spec.num_experts);
  const auto top_k = static_cast<size_t>(spec.top_k);
  RoutingResult result;
  std::vector<int32_t> ids(top_k);
  std::vector<double> weights(top_k);
  for (size_t begin = 0; begin < logits.size(); begin += experts) {
    const std::vector<double> row(logits.begin() + static_cast<std::ptrdiff_t>(begin),
                                  logits.begin() + static_cast<std::ptrdiff_t>(begin + experts));
    const bool ordered = routing::route_reference(spec, row.data(), ids.data(), weights.data());
    result.without_finite_logit += ordered ? 0 : 1;
    result.ids.insert(result.ids.end(), ids.begin(), ids.end());
    for (const double weight : weights) result.weights.push_back(static_cast<float>(weight));
  }
  return result;
}

// Distance of two finite non-negative floats in units of the last place.
inline int64_t ulp_distance(float a, float b) {
  return std::llabs(int64_t{std::bit_cast<int32_t>(a)} - int64_t{std::bit_cast<int32_t>(b)});
}

inline std::vector<float> random_logits(int64_t tokens, int64_t num_experts, float spread,
                                        uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> logits(static_cast<size_t>(tokens * num_experts));
  for (float& logit : logits) logit = normal(generator);
  return logits;
}

}  // namespace conclave::testing
