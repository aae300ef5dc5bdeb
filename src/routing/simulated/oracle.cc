#include "routing/oracle.h"

#include "routing/simulated/simulated.h"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace conclave::inline v0::routing {
namespace {

using namespace oracle;

uint64_t split_mix(uint64_t value) {
  uint64_t z = value + 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

Score simulated_key(const SimulatedRouting& simulated, uint64_t word, size_t expert) {
  const auto unit = [](uint64_t bits) { return std::ldexp(double(bits >> 12) + 0.5, -52); };
  switch (simulated.distribution) {
    case SimulatedDistribution::kNormal:
      return std::sqrt(-2 * std::log(unit(word))) *
             std::cos(2 * std::numbers::pi * unit(split_mix(word)));
    case SimulatedDistribution::kZipf:
      return -simulated.zipf_exponent * std::log(double(expert + 1)) -
             std::log(-std::log(unit(word)));
    default:
      return unit(word);
  }
}

}  // namespace

ReferenceChoice simulated_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const SimulatedRouting& simulated = spec.router.simulated;
  const auto top_k = static_cast<size_t>(spec.top_k);
  ReferenceChoice choice{
      .ids = {}, .weights = std::vector(top_k, 1.0 / double(top_k)), .shared_weights = {}};
  if (token.given_ids != nullptr) {
    choice.ids.assign(token.given_ids, token.given_ids + top_k);
  } else if (simulated.distribution == SimulatedDistribution::kReplay) {
    const size_t rows = simulated.replay_ids.size() / top_k;
    const size_t first = static_cast<size_t>(token.number) % rows * top_k;
    for (size_t j = 0; j < top_k; ++j) {
      choice.ids.push_back(simulated.replay_ids[first + j]);
      if (simulated.replay_weights.empty()) continue;
      choice.weights[j] = static_cast<double>(simulated.replay_weights[first + j]);
    }
  } else {
    const uint64_t stream =
        split_mix(split_mix(simulated.seed) ^ split_mix(static_cast<uint64_t>(token.number)));
    Scores keys;
    for (size_t e = 0; e < static_cast<size_t>(spec.num_experts); ++e) {
      const bool banned = token.banned != nullptr && token.banned[e] != 0;
      keys.push_back(banned ? Score() : simulated_key(simulated, split_mix(stream ^ e), e));
    }
    choice.ids = best_first(keys);
    choice.ids.resize(top_k);
  }
  return choice;
}

}  // namespace conclave::inline v0::routing
