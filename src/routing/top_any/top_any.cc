#include "routing/top_any/top_any.h"

#include "routing/rows.h"
#include "routing/score.h"
#include "routing/select.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::routing {
namespace {

class TopAnyRouter final : public Router {
 public:
  explicit TopAnyRouter(const MoeSpec& spec) : num_experts_(spec.num_experts), top_k_(spec.top_k) {}

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    const auto* thresholds = static_cast<const float*>(input.weights.tensors[0]);
    return route_rows(input, 0, executor, [&](int64_t token, double*) {
      const float* logits = input.logits + token * input.num_logits;
      int32_t* ids = output.topk_ids + token * top_k_;
      float* weights = output.topk_weights + token * top_k_;
      if (input.given_ids == nullptr) return choose(logits, thresholds, ids, weights);
      std::copy_n(input.given_ids + token * top_k_, top_k_, ids);
      weigh(logits, thresholds, ids, weights);
      return has_present(logits, num_experts_);
    });
  }

 private:
  bool choose(const float* logits, const float* thresholds, int32_t* ids, float* weights) const {
    // The weights' memory holds the compared logits until the weights are known.
    select_best(logits, num_experts_, top_k_, ids, weights);
    if (!is_present(weights[0])) return give_first_ids(top_k_, ids, weights);
    weigh(logits, thresholds, ids, weights);
    for (int64_t j = 0; j < top_k_; ++j) {
      if (weights[j] == 0.0F) ids[j] = -1;
    }
    return true;
  }

  void weigh(const float* logits, const float* thresholds, const int32_t* ids,
             float* weights) const {
    int64_t kept = 0;
    int64_t best = -1;
    for (int64_t j = 0; j < top_k_; ++j) {
      weights[j] = 0.0F;
      const bool named = ids[j] >= 0 && ids[j] < num_experts_;
      if (!named || !is_present(logits[ids[j]])) continue;
      if (best < 0 || logits[ids[j]] > logits[ids[best]]) best = j;
      if (logits[ids[j]] <= thresholds[ids[j]]) continue;
      weights[j] = 1.0F;
      ++kept;
    }
    if (best < 0) return;
    if (kept == 0) weights[best] = 1.0F;
    const double share = 1.0 / static_cast<double>(std::max<int64_t>(kept, 1));
    for (int64_t j = 0; j < top_k_; ++j) weights[j] *= static_cast<float>(share);
  }

  int64_t num_experts_;
  int64_t top_k_;
};

}  // namespace

Support top_any_supports(const MoeSpec& spec) {
  if (spec.top_k >= 1 && spec.top_k <= spec.num_experts) return Support::yes();
  return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                     std::to_string(spec.num_experts) + " experts");
}

std::unique_ptr<Router> make_top_any_router(const MoeSpec& spec) {
  return std::make_unique<TopAnyRouter>(spec);
}

}  // namespace conclave::inline v0::routing
