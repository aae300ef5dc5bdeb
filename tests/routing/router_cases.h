// Random problems of any row of the router catalog, for the conformance tests of both devices.
#pragma once

#include "routing/routing_problem.h"

#include "conclave/error.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {

inline MoeSpec drawn_spec(const routing::RouterRow& row, std::mt19937& generator) {
  MoeSpec spec = router_spec(1, 1, Renormalize::kSum);
  spec.router.name = std::string(row.name);
  row.draw(generator, spec);
  return spec;
}

// True if a sum of chosen scores may cancel out, which makes weights of any size.
inline bool may_cancel(const RouterSpec& router) {
  return router.score == RouterScore::kNone && router.renormalize == Renormalize::kSum;
}

// Logits that need care: ties, extremes and missing ones.
inline std::vector<float> special_logits(size_t count, std::mt19937& generator) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {std::numeric_limits<float>::quiet_NaN(),
                                     kInf,
                                     -kInf,
                                     0.0F,
                                     -0.0F,
                                     1.0F,
                                     -2.0F,
                                     80.0F,
                                     -90.0F};
  std::vector<float> logits(count);
  for (float& logit : logits) logit = values[generator() % values.size()];
  return logits;
}

// Calls visit(problem, what) for each problem of one draw.
inline void for_each_problem(
    const routing::RouterRow& row, uint32_t seed,
    const std::function<void(RoutingProblem& problem, const char* what)>& visit) {
  std::mt19937 generator(seed);
  const MoeSpec spec = drawn_spec(row, generator);
  const float spread = std::vector<float>{0.05F, 1.0F, 4.0F}[generator() % 3];
  RoutingProblem plain = random_problem(spec, 9, spread, seed);
  if (may_cancel(spec.router)) {
    for (float& logit : plain.logits) logit = std::abs(logit) + 0.1F;
  }
  visit(plain, "ordinary");
  RoutingProblem none = random_problem(spec, 0, 1.0F, seed);
  visit(none, "no tokens");
  RoutingProblem tied = plain;
  for (float& logit : tied.logits) logit = std::ceil(logit);
  visit(tied, "tied");
  RoutingProblem equal = plain;
  for (float& logit : equal.logits) logit = 0.25F;
  visit(equal, "all equal");
  if (may_cancel(spec.router)) return;
  RoutingProblem given = plain;
  const auto columns = static_cast<uint32_t>(spec.num_experts + spec.num_zero_experts);
  for (int64_t i = 0; i < plain.num_tokens() * spec.top_k; ++i) {
    given.given_ids.push_back(static_cast<int32_t>(generator() % (columns + 1)) - 1);
  }
  visit(given, "given ids");
  // These scores of +Inf weigh +Inf if nothing divides by it.
  const bool grows =
      spec.router.score == RouterScore::kNone || spec.router.score == RouterScore::kSqrtSoftplus;
  RoutingProblem special = plain;
  if (grows) special.spec.router.score = RouterScore::kSigmoid;
  special.logits = special_logits(plain.logits.size(), generator);
  visit(special, "special values");
  for (float& logit : special.logits) logit = std::numeric_limits<float>::quiet_NaN();
  visit(special, "nothing finite");
}

}  // namespace conclave::testing
