// Routings for a benchmark. Each call of a layer hits the next experts on a ring over all of that
// layer's experts, so that as many bytes as possible are read before an expert is read again.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace conclave::tool {

enum class RoutingPattern : uint8_t {
  kUniform,  // each token draws k experts with equal probability
  kZipf,     // the expert of popularity rank r is drawn with weight 1 / r^exponent
  kOne,      // all tokens use the same k experts
  kGate,     // the layer's own gate decides; no ids are made
};

struct RoutingChoice {
  RoutingPattern pattern = RoutingPattern::kUniform;
  double zipf_exponent = 1.0;
};
// Parses "uniform", "zipf" or "zipf:1.2", "one", "gate". Throws Error(kInvalidArgument).
RoutingChoice parse_routing(std::string_view text);

struct BenchCall {
  int64_t layer = 0;
  std::vector<int32_t> topk_ids;    // [T, k]; empty under kGate
  std::vector<float> topk_weights;  // [T, k], summing to 1 for each token
  int64_t experts_hit = 0;
};

class RoutingRing {
 public:
  RoutingRing(const MoeSpec& spec, int64_t num_layers, RoutingChoice choice, uint64_t seed);

  // The layers take turns.
  BenchCall next(int64_t num_tokens);

 private:
  std::vector<int32_t> draw(int64_t num_tokens);
  void draw_uniform(std::vector<int32_t>& ids, int64_t num_tokens);
  void draw_zipf(std::vector<int32_t>& ids, int64_t num_tokens);
  int64_t relabel(std::vector<int32_t>& ids, int64_t layer);

  int64_t num_experts_;
  int64_t top_k_;
  RoutingChoice choice_;
  std::mt19937_64 random_;
  std::vector<std::vector<int32_t>> rings_;  // per layer, a permutation of the experts
  std::vector<int64_t> positions_;           // per layer, the next place on its ring
  int64_t calls_ = 0;
};

}  // namespace conclave::tool
