#include "routing/sink_softmax/sink_softmax.h"

#include "core/shared_facts.h"
#include "routing/rows.h"
#include "routing/score.h"
#include "routing/topk/choose.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::routing {
namespace {

class SinkSoftmaxRouter final : public Router {
 public:
  explicit SinkSoftmaxRouter(const MoeSpec& spec)
      : choose_(ChooseRule::of(spec)),
        num_experts_(spec.num_experts),
        num_sinks_(spec.shared.count),
        top_k_(spec.top_k),
        scale_(spec.router.scale) {}

  size_t scratch_bytes(int32_t workers) const override {
    return scratch_bytes_of(scratch_doubles(), workers);
  }

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    const double scale = input.weights.global_scale != nullptr
                             ? scale_ * static_cast<double>(input.weights.global_scale[0])
                             : scale_;
    return route_rows(input, scratch_doubles(), executor, [&](int64_t token, double* scratch) {
      const float* logits = input.logits + token * input.num_logits;
      int32_t* ids = output.topk_ids + token * top_k_;
      const bool usable = has_present(logits, num_experts_);
      double* terms = scratch;
      if (input.given_ids != nullptr) {
        std::copy_n(input.given_ids + token * top_k_, top_k_, ids);
        std::fill_n(terms, top_k_, 0.0);
      } else {
        choose(logits, input.weights.selection_bias, scratch, ids);
      }
      weigh(logits, ids, terms, scale, output.topk_weights + token * top_k_,
            output.shared_weights + token * num_sinks_);
      return usable;
    });
  }

 private:
  int64_t num_terms() const { return top_k_ + num_sinks_; }
  int64_t scratch_doubles() const { return num_terms() + num_experts_ + choose_.scratch_doubles(); }

  // Leaves the keys that the chosen ids were compared by in the first k doubles of the scratch.
  void choose(const float* logits, const float* bias, double* scratch, int32_t* ids) const {
    double* scores = scratch + num_terms();
    for (int64_t i = 0; i < num_experts_; ++i) scores[i] = sigmoid(static_cast<double>(logits[i]));
    choose_row(choose_, logits, scores, bias, scores + num_experts_, ids, scratch);
  }

  // `terms` [k + S]: on entry the first k are the keys of `ids`; an absent one bars its id.
  void weigh(const float* logits, const int32_t* ids, double* terms, double scale, float* weights,
             float* shared) const {
    for (int64_t j = 0; j < top_k_; ++j) {
      const bool valid = is_present(terms[j]) && ids[j] >= 0 && ids[j] < num_experts_;
      terms[j] = valid ? term(logits[ids[j]]) : kAbsent;
    }
    for (int64_t s = 0; s < num_sinks_; ++s) terms[top_k_ + s] = term(logits[num_experts_ + s]);
    const SoftmaxSum sum = softmax_sum(terms, num_terms());
    for (int64_t j = 0; j < top_k_; ++j) {
      weights[j] = static_cast<float>(sum.weight(terms[j]) * scale);
    }
    for (int64_t s = 0; s < num_sinks_; ++s) {
      shared[s] = static_cast<float>(sum.weight(terms[top_k_ + s]) * scale);
    }
  }

  static double term(float logit) {
    return is_present(logit) ? log_sigmoid(static_cast<double>(logit)) : kAbsent;
  }

  ChooseRule choose_;
  int64_t num_experts_;
  int64_t num_sinks_;
  int64_t top_k_;
  double scale_;
};

}  // namespace

Support sink_softmax_supports(const MoeSpec& spec) {
  if (!shared_facts(spec).by_router() || spec.shared.count < 1) {
    return Support::no("no shared experts take their weight from the router");
  }
  if (spec.top_k >= 1 && spec.top_k <= spec.num_experts) return Support::yes();
  return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                     std::to_string(spec.num_experts) + " experts");
}

std::unique_ptr<Router> make_sink_softmax_router(const MoeSpec& spec) {
  return std::make_unique<SinkSoftmaxRouter>(spec);
}

}  // namespace conclave::inline v0::routing
