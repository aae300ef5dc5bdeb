#include "bench/routing_ring.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

namespace conclave::tool {
namespace {

MoeSpec make_spec(int64_t experts, int64_t top_k) {
  MoeSpec spec;
  spec.num_experts = experts;
  spec.top_k = top_k;
  return spec;
}

RoutingRing make_ring(const MoeSpec& spec, int64_t layers, RoutingPattern pattern) {
  return RoutingRing(spec, layers, {.pattern = pattern}, 7);
}

void expect_legal(const BenchCall& call, const MoeSpec& spec, int64_t num_tokens) {
  ASSERT_EQ(call.topk_ids.size(), static_cast<size_t>(num_tokens * spec.top_k));
  ASSERT_EQ(call.topk_weights.size(), call.topk_ids.size());
  std::set<int32_t> hit;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto begin = call.topk_ids.begin() + token * spec.top_k;
    const std::set<int32_t> ids(begin, begin + spec.top_k);
    EXPECT_EQ(ids.size(), static_cast<size_t>(spec.top_k)) << "a token draws an expert twice";
    EXPECT_GE(*ids.begin(), 0);
    EXPECT_LT(*ids.rbegin(), spec.num_experts);
    hit.insert(ids.begin(), ids.end());
    const auto weights = call.topk_weights.begin() + token * spec.top_k;
    EXPECT_NEAR(std::accumulate(weights, weights + spec.top_k, 0.0), 1.0,
                static_cast<double>(spec.top_k) * 1.2e-7);
  }
  EXPECT_EQ(call.experts_hit, static_cast<int64_t>(hit.size()));
}

TEST(RoutingRing, OneToken_ReadsEveryExpertBeforeAnyTwice) {
  const MoeSpec spec = make_spec(128, 8);
  RoutingRing ring = make_ring(spec, 1, RoutingPattern::kUniform);
  for (int turn = 0; turn < 3; ++turn) {
    std::set<int32_t> seen;
    for (int call = 0; call < 16; ++call) {
      const BenchCall next = ring.next(1);
      expect_legal(next, spec, 1);
      seen.insert(next.topk_ids.begin(), next.topk_ids.end());
    }
    EXPECT_EQ(seen.size(), 128U);
  }
}

TEST(RoutingRing, SeveralLayers_TakeTurns) {
  RoutingRing ring = make_ring(make_spec(8, 2), 3, RoutingPattern::kUniform);
  for (int64_t call = 0; call < 9; ++call) EXPECT_EQ(ring.next(1).layer, call % 3);
}

TEST(RoutingRing, Uniform_HitsTheExpectedNumberOfExperts) {
  const MoeSpec spec = make_spec(128, 8);
  RoutingRing ring = make_ring(spec, 1, RoutingPattern::kUniform);
  constexpr int kCalls = 400;
  constexpr int64_t kTokens = 4;
  double hit = 0;
  for (int i = 0; i < kCalls; ++i) {
    const BenchCall call = ring.next(kTokens);
    expect_legal(call, spec, kTokens);
    hit += static_cast<double>(call.experts_hit);
  }
  // The mean is E (1 - (1 - k/E)^T) = 29.1; a call's count varies by less than 2 around it.
  const double expected = 128.0 * (1.0 - std::pow(1.0 - 8.0 / 128.0, 4));
  EXPECT_NEAR(hit / kCalls, expected, 5 * 2.0 / std::sqrt(kCalls));
}

TEST(RoutingRing, OnePattern_UsesTheSameExpertsForAllTokens) {
  const MoeSpec spec = make_spec(16, 4);
  RoutingRing ring = make_ring(spec, 1, RoutingPattern::kOne);
  const BenchCall call = ring.next(10);
  expect_legal(call, spec, 10);
  EXPECT_EQ(call.experts_hit, 4);
}

TEST(RoutingRing, Zipf_IsSkewed) {
  const MoeSpec spec = make_spec(64, 2);
  RoutingRing ring(spec, 1, {.pattern = RoutingPattern::kZipf, .zipf_exponent = 1.5}, 7);
  const BenchCall call = ring.next(1000);
  expect_legal(call, spec, 1000);
  std::map<int32_t, int> load;
  for (const int32_t id : call.topk_ids) ++load[id];
  const auto busiest = std::max_element(load.begin(), load.end(),
                                        [](auto& a, auto& b) { return a.second < b.second; });
  EXPECT_GT(busiest->second, 10 * 2000 / 64);
}

TEST(RoutingRing, AllExperts_ForEachToken) {
  const MoeSpec spec = make_spec(4, 4);
  RoutingRing ring = make_ring(spec, 1, RoutingPattern::kUniform);
  expect_legal(ring.next(3), spec, 3);
}

TEST(RoutingRing, Gate_MakesNoIds) {
  RoutingRing ring = make_ring(make_spec(4, 2), 1, RoutingPattern::kGate);
  EXPECT_TRUE(ring.next(3).topk_ids.empty());
}

TEST(RoutingRing, Names_ParseAndBadOnesThrow) {
  EXPECT_EQ(parse_routing("zipf:1.2").zipf_exponent, 1.2);
  EXPECT_EQ(parse_routing("gate").pattern, RoutingPattern::kGate);
  for (const char* text : {"", "zipf:", "zipf:-1", "zipf:x", "zipf:99", "Uniform"}) {
    EXPECT_THROW(parse_routing(text), Error) << text;
  }
}

}  // namespace
}  // namespace conclave::tool
