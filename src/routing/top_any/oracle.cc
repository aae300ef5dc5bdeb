#include "routing/oracle.h"

#include "routing/top_any/top_any.h"

namespace conclave::inline v0::routing {

using namespace oracle;

ReferenceChoice top_any_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const auto* thresholds = static_cast<const float*>(token.weights.tensors[0]);
  const Scores logits = read_logits(token.logits, spec.num_experts);
  const auto top_k = static_cast<size_t>(spec.top_k);
  ReferenceChoice choice{.ids = best_first(logits), .weights = {}, .shared_weights = {}};
  choice.usable = any_present(logits);
  choice.ids.resize(top_k);
  if (token.given_ids != nullptr) choice.ids.assign(token.given_ids, token.given_ids + top_k);

  Scores chosen;
  for (const int32_t id : choice.ids) {
    const bool named = id >= 0 && id < spec.num_experts;
    chosen.push_back(named ? logits[static_cast<size_t>(id)] : Score());
  }
  std::vector<bool> kept(top_k);
  double count = 0;
  for (size_t j = 0; j < top_k; ++j) {
    kept[j] = chosen[j] && *chosen[j] > static_cast<double>(thresholds[choice.ids[j]]);
    count += kept[j] ? 1 : 0;
  }
  if (count == 0 && any_present(chosen)) {
    kept[static_cast<size_t>(best_first(chosen)[0])] = true;
    count = 1;
  }
  for (size_t j = 0; j < top_k; ++j) {
    choice.weights.push_back(kept[j] ? 1 / count : 0);
    if (!kept[j] && choice.usable && token.given_ids == nullptr) choice.ids[j] = -1;
  }
  return choice;
}

}  // namespace conclave::inline v0::routing
