#include "routing/oracle.h"

#include "routing/sparse_mixer/sparse_mixer.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace conclave::inline v0::routing {
namespace {

using namespace oracle;

// One round of sparse_mixer: the weight of `id` among the logits near the best of `logits`.
double mixer_weight(const Scores& logits, int32_t id, double epsilon) {
  const double max = logits[static_cast<size_t>(best_first(logits)[0])].value_or(-kInf);
  Scores near = logits;
  for (Score& logit : near) {
    if (!logit || max == kInf) continue;
    const double factor = std::max(std::abs(*logit), max);
    if ((max - *logit) / factor > 2 * epsilon) logit.reset();
  }
  const Scores weights = softmax(near);
  return id >= 0 ? weights[static_cast<size_t>(id)].value_or(0) : 0;
}

}  // namespace

ReferenceChoice sparse_mixer_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  Scores logits = read_logits(token.logits, spec.num_experts);
  ReferenceChoice choice{.ids = {}, .weights = {}, .shared_weights = {}, .usable = true};
  choice.usable = any_present(logits);
  for (int round = 0; round < spec.top_k; ++round) {
    std::vector<int32_t> order = best_first(logits);
    std::erase_if(order, [&](int32_t id) { return round == 1 && id == choice.ids[0]; });
    const int32_t id = token.given_ids != nullptr ? token.given_ids[round] : order[0];
    choice.ids.push_back(id);
    choice.weights.push_back(mixer_weight(logits, id, spec.router.jitter_epsilon));
    if (id >= 0) logits[static_cast<size_t>(id)].reset();
  }
  return choice;
}

}  // namespace conclave::inline v0::routing
