#include "routing/oracle.h"

#include "routing/sink_softmax/sink_softmax.h"

#include <vector>

namespace conclave::inline v0::routing {
namespace {

using namespace oracle;

double log_sigmoid(double logit) { return -softplus(-logit); }

}  // namespace

ReferenceChoice sink_softmax_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const Scores logits = read_logits(token.logits, spec.num_experts + spec.shared.count);
  const Scores routed(logits.begin(), logits.begin() + spec.num_experts);
  ReferenceChoice choice{.ids = {}, .weights = {}, .shared_weights = {}, .usable = true};
  choice.usable = any_present(routed);
  RouterSpec by_sigmoid = spec.router;
  by_sigmoid.score = RouterScore::kSigmoid;
  const Scores keys =
      keys_of(spec.router, routed, score(by_sigmoid, routed), token.weights.selection_bias);
  choice.ids = best_first(keys);
  choice.ids.resize(static_cast<size_t>(spec.top_k));
  if (token.given_ids != nullptr) choice.ids.assign(token.given_ids, token.given_ids + spec.top_k);
  Scores terms;
  for (const int32_t id : choice.ids) {
    const bool named = id >= 0 && id < spec.num_experts;
    const auto index = static_cast<size_t>(named ? id : 0);
    const bool present = named && (token.given_ids != nullptr || keys[index].has_value());
    terms.push_back(present ? routed[index] : Score());
  }
  terms.insert(terms.end(), logits.begin() + spec.num_experts, logits.end());
  for (Score& term : terms) {
    if (term) term = log_sigmoid(*term);
  }
  std::vector<int32_t> slots = choice.ids;
  slots.resize(terms.size(), -1);
  std::vector<double> weights = scaled(spec, token, slots, softmax(terms));
  choice.shared_weights.assign(weights.begin() + spec.top_k, weights.end());
  weights.resize(static_cast<size_t>(spec.top_k));
  choice.weights = std::move(weights);
  return choice;
}

}  // namespace conclave::inline v0::routing
