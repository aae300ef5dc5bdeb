#include "routing/softmax_threshold/softmax_threshold.h"

#include "routing/rows.h"
#include "routing/score.h"
#include "routing/select.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace conclave::inline v0::routing {
namespace {

class SoftmaxThresholdRouter final : public Router {
 public:
  explicit SoftmaxThresholdRouter(const MoeSpec& spec)
      : num_experts_(spec.num_experts), top_k_(spec.top_k), threshold_(softmax_threshold(spec)) {}

  size_t scratch_bytes(int32_t workers) const override { return scratch_bytes_of(top_k_, workers); }

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    return route_rows(input, top_k_, executor, [&](int64_t token, double* scratch) {
      const float* logits = input.logits + token * input.num_logits;
      int32_t* ids = output.topk_ids + token * top_k_;
      float* weights = output.topk_weights + token * top_k_;
      if (input.given_ids == nullptr) return choose(logits, scratch, ids, weights);
      std::copy_n(input.given_ids + token * top_k_, top_k_, ids);
      float best = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < num_experts_; ++i) best = std::max(best, comparable(logits[i]));
      weigh(logits, best, ids, scratch, weights);
      return is_present(best);
    });
  }

 private:
  bool choose(const float* logits, double* scratch, int32_t* ids, float* weights) const {
    // The weights' memory holds the compared logits until the weights are known.
    select_best(logits, num_experts_, top_k_, ids, weights);
    const float best = weights[0];
    if (!is_present(best)) return give_first_ids(top_k_, ids, weights);
    weigh(logits, best, ids, scratch, weights);
    for (int64_t j = 0; j < top_k_; ++j) {
      if (!is_present(scratch[j])) ids[j] = -1;
    }
    return true;
  }

  // Leaves the logits that are kept in `terms` [k].
  void weigh(const float* logits, float best, const int32_t* ids, double* terms,
             float* weights) const {
    for (int64_t j = 0; j < top_k_; ++j) {
      const bool named = ids[j] >= 0 && ids[j] < num_experts_;
      terms[j] = named ? kept(logits[ids[j]], best) : kAbsent;
    }
    const SoftmaxSum sum = softmax_sum(terms, top_k_);
    for (int64_t j = 0; j < top_k_; ++j) weights[j] = static_cast<float>(sum.weight(terms[j]));
  }

  // The logit, or kAbsent below the threshold.
  double kept(float logit, float best) const {
    const double distance = static_cast<double>(logit) - static_cast<double>(best);
    const bool keeps = logit == best || distance >= threshold_;
    return keeps && is_present(logit) ? static_cast<double>(logit) : kAbsent;
  }

  int64_t num_experts_;
  int64_t top_k_;
  double threshold_;
};

}  // namespace

double softmax_threshold(const MoeSpec& spec) {
  return std::log(option_of(spec.router, kSoftmaxThresholdOptions[0]));
}

Support softmax_threshold_supports(const MoeSpec& spec) {
  if (spec.top_k >= 1 && spec.top_k <= spec.num_experts) return Support::yes();
  return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                     std::to_string(spec.num_experts) + " experts");
}

std::unique_ptr<Router> make_softmax_threshold_router(const MoeSpec& spec) {
  return std::make_unique<SoftmaxThresholdRouter>(spec);
}

}  // namespace conclave::inline v0::routing
