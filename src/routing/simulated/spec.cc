#include "routing/check_spec.h"
#include "routing/simulated/simulated.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {
namespace {

void check_replay(const MoeSpec& spec) {
  const SimulatedRouting& simulated = spec.router.simulated;
  check_choice("simulated.distribution", simulated.distribution, SimulatedDistribution::kReplay);
  check_not_negative("simulated.zipf_exponent", simulated.zipf_exponent);
  const auto num_ids = static_cast<int64_t>(simulated.replay_ids.size());
  const auto num_weights = static_cast<int64_t>(simulated.replay_weights.size());
  if (simulated.distribution != SimulatedDistribution::kReplay) {
    if (num_ids != 0)
      refuse_field("simulated.replay_ids", std::to_string(num_ids),
                   "empty but for SimulatedDistribution::kReplay");
    if (num_weights != 0) {
      refuse_field("simulated.replay_weights", std::to_string(num_weights),
                   "empty but for SimulatedDistribution::kReplay");
    }
    return;
  }
  if (num_ids == 0 || num_ids % spec.top_k != 0) {
    refuse_field("simulated.replay_ids", std::to_string(num_ids) + " ids",
                 "whole rows of k = " + std::to_string(spec.top_k) + ", at least one");
  }
  if (num_weights != 0 && num_weights != num_ids) {
    refuse_field("simulated.replay_weights", std::to_string(num_weights) + " weights",
                 "none, or one for each of the " + std::to_string(num_ids) + " ids");
  }
  for (int64_t index = 0; index < num_ids; ++index) {
    const int32_t id = simulated.replay_ids[static_cast<size_t>(index)];
    if (id >= -1 && id < spec.num_experts) continue;
    refuse_field("simulated.replay_ids[" + std::to_string(index) + "]", std::to_string(id),
                 "-1 to " + std::to_string(spec.num_experts - 1));
  }
}

}  // namespace

RouterTensorSize replay_size(const MoeSpec& spec, size_t elements) {
  const int64_t cols = std::max<int64_t>(spec.top_k, 1);
  return {.rows = static_cast<int64_t>(elements) / cols, .cols = cols};
}

void keep_simulated_choices(MoeSpec& spec, int64_t top_k) {
  const auto keep = [&](auto& recorded) {
    const auto slots = static_cast<size_t>(spec.top_k);
    size_t kept = 0;
    for (size_t index = 0; index < recorded.size(); ++index) {
      if (index % slots < static_cast<size_t>(top_k)) recorded[kept++] = recorded[index];
    }
    recorded.resize(kept);
  };
  keep(spec.router.simulated.replay_ids);
  keep(spec.router.simulated.replay_weights);
}

void check_simulated(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  refuse_choosing(router);
  refuse_weighing(router);
  refuse_scales(router);
  const UnusedFields unused(router);
  unused.must_be("score", router.score, {RouterScore::kSoftmax});
  unused.must_be("renormalize", router.renormalize, {Renormalize::kSum, Renormalize::kNone});
  check_replay(spec);
}

void refuse_simulated_fields(const RouterSpec& other) {
  const UnusedFields unused(other);
  const SimulatedRouting& simulated = other.simulated;
  const bool replays = !simulated.replay_ids.empty() || !simulated.replay_weights.empty();
  unused.must_be("simulated.distribution", simulated.distribution,
                 {SimulatedDistribution::kUniform});
  unused.must_be("simulated.seed", simulated.seed, {uint64_t{0}});
  unused.must_be("simulated.zipf_exponent", simulated.zipf_exponent, {1.0});
  unused.must_be("simulated.replay_ids", replays, {false});
}

void draw_simulated(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  SimulatedRouting& simulated = spec.router.simulated;
  spec.num_experts = 1 + pick(64);
  spec.top_k = 1 + pick(static_cast<uint32_t>(spec.num_experts));
  simulated.distribution = static_cast<SimulatedDistribution>(pick(4));
  simulated.seed = generator();
  simulated.zipf_exponent = 0.25 * static_cast<double>(pick(8));
  if (simulated.distribution != SimulatedDistribution::kReplay) return;
  const int64_t choices = (1 + pick(7)) * spec.top_k;
  const bool weighs = pick(2) == 0;
  for (int64_t i = 0; i < choices; ++i) {
    const auto ids = static_cast<uint32_t>(spec.num_experts + 1);
    simulated.replay_ids.push_back(static_cast<int32_t>(pick(ids)) - 1);
    if (weighs) simulated.replay_weights.push_back(0.25F * static_cast<float>(pick(9)));
  }
}

}  // namespace conclave::inline v0::routing
