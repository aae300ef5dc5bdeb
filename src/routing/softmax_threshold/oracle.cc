#include "routing/oracle.h"

#include "routing/softmax_threshold/softmax_threshold.h"

#include <cmath>

namespace conclave::inline v0::routing {

using namespace oracle;

ReferenceChoice softmax_threshold_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const Scores logits = read_logits(token.logits, spec.num_experts);
  const std::vector<int32_t> order = best_first(logits);
  const double best = logits[static_cast<size_t>(order[0])].value_or(-kInf);
  const double lowest = best + std::log(option_of(spec.router, kSoftmaxThresholdOptions[0]));
  ReferenceChoice choice{.ids = {}, .weights = {}, .shared_weights = {}, .usable = true};
  choice.usable = any_present(logits);
  choice.ids.assign(order.begin(), order.begin() + spec.top_k);
  if (token.given_ids != nullptr) choice.ids.assign(token.given_ids, token.given_ids + spec.top_k);
  Scores kept;
  for (int32_t& id : choice.ids) {
    const bool named = id >= 0 && id < spec.num_experts;
    const Score logit = named ? logits[static_cast<size_t>(id)] : Score();
    kept.push_back(logit && *logit >= lowest ? logit : Score());
    if (!kept.back() && choice.usable && token.given_ids == nullptr) id = -1;
  }
  for (const Score& share : softmax(kept)) choice.weights.push_back(share.value_or(0));
  return choice;
}

}  // namespace conclave::inline v0::routing
