#include "routing/topk/topk.h"

#include "cpu/parallel.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <string>

namespace conclave::inline v0::routing {
namespace {

// Rows handed to a worker at once: about 10 us of work.
constexpr int64_t kRowGrain = 32;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float comparable(float logit) { return std::isnan(logit) ? -kInfinity : logit; }

// Insertion into the output arrays, which hold the best so far in order: no scratch for any k.
// Equal logits are met in ascending id and `>` keeps the earlier one ahead.
void select_best(const float* logits, int64_t num_experts, int64_t top_k, int32_t* ids,
                 float* scores) {
  int64_t held = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const float score = comparable(logits[expert]);
    if (held == top_k && !(score > scores[top_k - 1])) continue;
    int64_t at = held < top_k ? held++ : top_k - 1;
    for (; at > 0 && score > scores[at - 1]; --at) {
      scores[at] = scores[at - 1];
      ids[at] = ids[at - 1];
    }
    scores[at] = score;
    ids[at] = static_cast<int32_t>(expert);
  }
}

// exp in double: a float difference x - max would already cost up to 8 ulp of the weight.
double exp_sum(const float* values, int64_t count, double max) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = comparable(values[i]);
    sum += std::exp(static_cast<double>(value) - max);
  }
  return sum;
}

int64_t count_infinite(const float* values, int64_t count) {
  int64_t infinite = 0;
  for (int64_t i = 0; i < count; ++i) infinite += values[i] == kInfinity ? 1 : 0;
  return infinite;
}

// Replaces the scores of the chosen experts by their weights.
void weigh(const float* summed, int64_t num_summed, int64_t top_k, float* scores) {
  const double max = static_cast<double>(scores[0]);
  if (scores[0] == kInfinity) {
    const auto share =
        static_cast<float>(1.0 / static_cast<double>(count_infinite(summed, num_summed)));
    for (int64_t j = 0; j < top_k; ++j) scores[j] = scores[j] == kInfinity ? share : 0.0F;
    return;
  }
  const double sum = exp_sum(summed, num_summed, max);
  for (int64_t j = 0; j < top_k; ++j) {
    scores[j] = static_cast<float>(std::exp(static_cast<double>(scores[j]) - max) / sum);
  }
}

class TopkRouter final : public Router {
 public:
  TopkRouter(int64_t top_k, Renormalize renormalize) : top_k_(top_k), renormalize_(renormalize) {}

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    std::atomic<int64_t> without_order{0};
    cpu::parallel_for(
        executor, input.num_tokens, kRowGrain, [&](int64_t begin, int64_t end, int32_t) {
          int64_t unusable = 0;
          for (int64_t token = begin; token < end; ++token) {
            const bool ordered = route_topk_row(
                input.logits + token * input.num_experts, input.num_experts, top_k_, renormalize_,
                output.topk_ids + token * top_k_, output.topk_weights + token * top_k_);
            unusable += ordered ? 0 : 1;
          }
          if (unusable != 0) without_order.fetch_add(unusable, std::memory_order_relaxed);
        });
    return {.tokens_without_finite_logit = without_order.load(std::memory_order_relaxed)};
  }

 private:
  int64_t top_k_;
  Renormalize renormalize_;
};

}  // namespace

bool route_topk_row(const float* logits, int64_t num_experts, int64_t top_k,
                    Renormalize renormalize, int32_t* topk_ids, float* topk_weights) {
  select_best(logits, num_experts, top_k, topk_ids, topk_weights);
  if (topk_weights[0] == -kInfinity) {
    // All compared equal, so the selection is 0..k-1 already.
    for (int64_t j = 0; j < top_k; ++j) topk_weights[j] = 0;
    return false;
  }
  switch (renormalize) {
    case Renormalize::kNone:
      weigh(logits, num_experts, top_k, topk_weights);
      break;
    case Renormalize::kSum:
      weigh(topk_weights, top_k, top_k, topk_weights);
      break;
  }
  return true;
}

Support topk_supports(const MoeSpec& spec) {
  if (spec.router.score != RouterScore::kSoftmax) {
    return Support::no("the score is not softmax");
  }
  if (spec.top_k < 1 || spec.top_k > spec.num_experts) {
    return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                       std::to_string(spec.num_experts) + " experts");
  }
  return Support::yes();
}

std::unique_ptr<Router> make_topk_router(const MoeSpec& spec) {
  return std::make_unique<TopkRouter>(spec.top_k, spec.router.renormalize);
}

}  // namespace conclave::inline v0::routing
