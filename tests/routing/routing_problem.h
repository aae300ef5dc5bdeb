// Routing problems and the float64 oracle's answer, for the router tests.
#pragma once

#include "routing/router.h"
#include "support/executors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {

// The inputs of a router. Vectors may stay empty if the spec has none.
struct RoutingProblem {
  MoeSpec spec;
  std::vector<float> logits = {};  // [T, num_logits]
  std::vector<int32_t> given_ids = {};
  std::vector<int32_t> token_ids = {};
  std::vector<float> selection_bias = {};
  std::vector<float> expert_scale = {};
  std::vector<float> global_scale = {};
  // Tensors of the router's own, in the order of its row; floats as their bits.
  std::vector<std::vector<int32_t>> tensors = {};
  int64_t tokens_without_logits = 0;  // T, if there are no logits
  int64_t first_token = 0;

  int64_t num_tokens() const {
    return logits.empty() ? tokens_without_logits
                          : static_cast<int64_t>(logits.size()) / num_logits(spec);
  }
  RouterWeights weights() const {
    const auto data = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
    RouterWeights weights{.selection_bias = data(selection_bias),
                          .expert_scale = data(expert_scale),
                          .global_scale = data(global_scale)};
    for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
      if (!own.tensor->id || own.place.value() >= tensors.size()) continue;
      routing::set_router_tensor(own, data(tensors[*own.place]), weights);
    }
    return weights;
  }
};

struct RoutingResult {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> shared_weights = {};
  int64_t without_finite_logit = 0;
  friend bool operator==(const RoutingResult&, const RoutingResult&) = default;
};

inline MoeSpec router_spec(int64_t num_experts, int64_t top_k, Renormalize renormalize) {
  MoeSpec spec;
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  spec.hidden_size = 8;
  spec.intermediate_size = 8;
  spec.router.renormalize = renormalize;
  return spec;
}

inline std::string describe(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  const auto number = [](auto value) { return std::to_string(static_cast<int>(value)); };
  return router.name + ": experts " + std::to_string(spec.num_experts) + " + " +
         std::to_string(spec.num_zero_experts) + ", top_k " + std::to_string(spec.top_k) +
         ", score " + number(router.score) + ", order " + number(router.order) + ", groups " +
         std::to_string(router.topk_groups) + " of " + std::to_string(router.num_groups) +
         ", group score " + number(router.group_score) + ", mask " + number(router.group_mask) +
         ", bias " + number(router.has_selection_bias) + ", renormalize " +
         number(router.renormalize) + ", epsilon " + std::to_string(router.epsilon) + ", cap " +
         std::to_string(router.soft_cap) + ", scale " + std::to_string(router.scale) +
         ", score type " + std::string(to_string(router.score_dtype));
}

inline int64_t num_sinks(const MoeSpec& spec) {
  return spec.shared.mode == SharedMode::kRouterWeight ? spec.shared.count : 0;
}

inline RoutingResult route(const RoutingProblem& problem, Executor& executor) {
  const MoeSpec& spec = problem.spec;
  const auto router = routing::router_catalog().find(spec.router.name, "router").make(spec);
  const auto pointer = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
  const int64_t tokens = problem.num_tokens();
  RoutingResult result;
  result.ids.assign(static_cast<size_t>(tokens * spec.top_k), -77);
  result.weights.assign(result.ids.size(), -77.0F);
  result.shared_weights.assign(static_cast<size_t>(tokens * num_sinks(spec)), -77.0F);
  std::vector<double> scratch(router->scratch_bytes(executor.concurrency()) / sizeof(double));
  const RouterStats stats = router->route({.num_tokens = tokens,
                                           .num_experts = spec.num_experts,
                                           .num_logits = num_logits(spec),
                                           .logits = pointer(problem.logits),
                                           .token_ids = pointer(problem.token_ids),
                                           .given_ids = pointer(problem.given_ids),
                                           .first_token = problem.first_token,
                                           .weights = problem.weights(),
                                           .scratch = std::as_writable_bytes(std::span(scratch))},
                                          {.topk_ids = result.ids.data(),
                                           .topk_weights = result.weights.data(),
                                           .shared_weights = result.shared_weights.data()},
                                          executor);
  result.without_finite_logit = stats.tokens_without_finite_logit;
  return result;
}

inline RoutingResult route(const RoutingProblem& problem) {
  SerialExecutor executor;
  return route(problem, executor);
}
inline RoutingResult route(const MoeSpec& spec, const std::vector<float>& logits,
                           Executor& executor) {
  return route({.spec = spec, .logits = logits}, executor);
}
inline RoutingResult route(const MoeSpec& spec, const std::vector<float>& logits) {
  return route(RoutingProblem{.spec = spec, .logits = logits});
}

inline RoutingResult oracle(const RoutingProblem& problem) {
  const MoeSpec& spec = problem.spec;
  const std::vector<double> logits(problem.logits.begin(), problem.logits.end());
  RoutingResult result;
  for (int64_t token = 0; token < problem.num_tokens(); ++token) {
    const auto index = static_cast<size_t>(token);
    const routing::ReferenceChoice choice = routing::route_reference(
        spec,
        {.logits = logits.empty() ? nullptr : logits.data() + token * num_logits(spec),
         .given_ids =
             problem.given_ids.empty() ? nullptr : problem.given_ids.data() + token * spec.top_k,
         .token_id = problem.token_ids.empty() ? 0 : problem.token_ids[index],
         .number = problem.first_token + token,
         .weights = problem.weights()});
    result.without_finite_logit += choice.usable ? 0 : 1;
    result.ids.insert(result.ids.end(), choice.ids.begin(), choice.ids.end());
    for (const double weight : choice.weights) {
      result.weights.push_back(static_cast<float>(weight));
    }
    for (const double weight : choice.shared_weights) {
      result.shared_weights.push_back(static_cast<float>(weight));
    }
  }
  return result;
}
inline RoutingResult oracle(const MoeSpec& spec, const std::vector<float>& logits) {
  return oracle(RoutingProblem{.spec = spec, .logits = logits});
}

// Distance of two finite floats in units of the last place; 0 and -0 are one apart.
inline int64_t ulp_distance(float a, float b) {
  const auto ordered = [](float value) {
    const auto bits = std::bit_cast<int32_t>(value);
    return bits >= 0 ? int64_t{bits} : -int64_t{bits & 0x7fffffff};
  };
  return std::llabs(ordered(a) - ordered(b));
}

// Bar N6: weights within 2 units in the last place of float32, which is tighter than 1e-6.
inline constexpr int64_t kMaxUlp = 2;

inline void expect_weights(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i])) << "at " << i;
    ASSERT_LE(ulp_distance(actual[i], expected[i]), kMaxUlp)
        << "at " << i << ": " << actual[i] << " for " << expected[i];
  }
}

// Expects equal ids, and weights within the bar.
inline void expect_equals_oracle(const RoutingProblem& problem) {
  SCOPED_TRACE(describe(problem.spec));
  const RoutingResult actual = route(problem);
  const RoutingResult expected = oracle(problem);
  ASSERT_EQ(actual.ids, expected.ids);
  EXPECT_EQ(actual.without_finite_logit, expected.without_finite_logit);
  expect_weights(actual.weights, expected.weights);
  expect_weights(actual.shared_weights, expected.shared_weights);
}

inline std::vector<float> random_floats(int64_t count, float mean, float spread, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(mean, spread);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

inline std::vector<float> random_logits(int64_t tokens, int64_t num_experts, float spread,
                                        uint32_t seed) {
  return random_floats(tokens * num_experts, 0.0F, spread, seed);
}

// Values that a router's tensor may have; floats as their bits.
inline std::vector<int32_t> random_values(const MoeSpec& spec,
                                          const routing::SizedRouterTensor& own,
                                          std::mt19937& generator) {
  std::vector<int32_t> values(static_cast<size_t>(own.num_elements()));
  std::normal_distribution<float> normal(own.tensor->mean, own.tensor->deviation);
  for (int32_t& value : values) {
    value = own.tensor->element == routing::RouterElement::kIndex
                ? static_cast<int32_t>(generator() %
                                       static_cast<uint32_t>(own.tensor->index_limit(spec)))
                : std::bit_cast<int32_t>(normal(generator));
  }
  return values;
}

// Fills the vectors that the spec requires.
inline RoutingProblem random_problem(const MoeSpec& spec, int64_t tokens, float spread,
                                     uint32_t seed) {
  RoutingProblem problem{.spec = spec};
  const RouterSpec& router = spec.router;
  problem.logits = random_logits(tokens, num_logits(spec), spread, seed);
  if (router.has_selection_bias) {
    problem.selection_bias =
        random_floats(spec.num_experts + spec.num_zero_experts, 0.0F, 0.3F, seed + 1);
  }
  if (router.has_expert_scale) {
    problem.expert_scale = random_floats(spec.num_experts, 1.0F, 0.2F, seed + 2);
  }
  if (router.has_global_scale) problem.global_scale = {1.75F};
  std::mt19937 generator(seed + 3);
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
    if (own.tensor->id) problem.tensors.push_back(random_values(spec, own, generator));
  }
  const int64_t num_ids = routing::router_traits(spec).num_token_ids;
  for (int64_t token = 0; num_ids > 0 && token < tokens; ++token) {
    problem.token_ids.push_back(static_cast<int32_t>(generator() % static_cast<uint32_t>(num_ids)));
  }
  return problem;
}

// The valid spec with the fewest settings that runs a row of the catalog on 8 experts.
inline MoeSpec spec_of_row(std::string_view name) {
  MoeSpec spec = router_spec(8, 2, Renormalize::kSum);
  spec.router.name = std::string(name);
  if (name == "hash") spec.router.vocab_size = 50;
  if (name == "sparse_mixer") spec.router.jitter_epsilon = 0.01;
  if (name == "sink_softmax") {
    spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 8, .count = 2};
  }
  return spec;
}

}  // namespace conclave::testing
