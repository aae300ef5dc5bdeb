#include "routing/sparse_mixer/sparse_mixer.h"

#include "routing/rows.h"
#include "routing/score.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace conclave::inline v0::routing {
namespace {

// The second round is left out where a call asks for one choice.
constexpr int64_t kMostChoices = 2;

// One round over a row; `excluded` is the expert chosen before, -1 for none.
class Round {
 public:
  Round(const float* logits, int64_t count, int32_t excluded, double epsilon)
      : logits_(logits), count_(count), excluded_(excluded), epsilon_(epsilon) {
    for (int32_t i = 0; i < count_; ++i) {
      if (i == excluded_) continue;
      const double logit = at(i);
      // If all logits are absent this takes the first column in range, so that ids stay distinct.
      if (best_ < 0 || logit > max_) {
        best_ = i;
        max_ = logit;
      }
    }
  }

  int32_t best() const { return best_; }

  // The weight of `id` in the softmax over the logits close enough to the maximum.
  double weight(int32_t id) const {
    if (id < 0 || id >= count_ || !is_present(max_) || is_masked(id)) return 0;
    if (max_ == kInfinity) return at(id) == kInfinity ? 1.0 / static_cast<double>(infinite()) : 0.0;
    double sum = 0;
    for (int32_t i = 0; i < count_; ++i) {
      if (!is_masked(i)) sum += std::exp(at(i) - max_);
    }
    return std::exp(at(id) - max_) / sum;
  }

 private:
  double at(int32_t id) const { return capped(logits_[id], 0); }

  // Masks if (m - l) / max(|l|, m) > 2 epsilon. As in the published code, `>` keeps 0 / 0.
  bool is_masked(int32_t id) const {
    const double logit = at(id);
    if (id == excluded_ || !is_present(logit)) return true;
    return (max_ - logit) / std::max(std::abs(logit), max_) > 2 * epsilon_;
  }

  int64_t infinite() const {
    int64_t found = 0;
    for (int32_t i = 0; i < count_; ++i) found += i != excluded_ && at(i) == kInfinity ? 1 : 0;
    return found;
  }

  const float* logits_;
  int64_t count_;
  int32_t excluded_;
  double epsilon_;
  int32_t best_ = -1;
  double max_ = kAbsent;
};

class SparseMixerRouter final : public Router {
 public:
  explicit SparseMixerRouter(const MoeSpec& spec)
      : num_experts_(spec.num_experts), top_k_(spec.top_k), epsilon_(spec.router.jitter_epsilon) {}

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    return route_rows(input, 0, executor, [&](int64_t token, double*) {
      const int32_t* given =
          input.given_ids != nullptr ? input.given_ids + token * top_k_ : nullptr;
      return route_row(input.logits + token * input.num_logits, given,
                       output.topk_ids + token * top_k_, output.topk_weights + token * top_k_);
    });
  }

 private:
  bool route_row(const float* logits, const int32_t* given, int32_t* ids, float* weights) const {
    const bool usable = has_present(logits, num_experts_);
    const Round first(logits, num_experts_, -1, epsilon_);
    ids[0] = given != nullptr ? given[0] : first.best();
    weights[0] = static_cast<float>(first.weight(ids[0]));
    if (top_k_ == 1) return usable;
    const Round second(logits, num_experts_, ids[0], epsilon_);
    ids[1] = given != nullptr ? given[1] : second.best();
    weights[1] = static_cast<float>(second.weight(ids[1]));
    return usable;
  }

  int64_t num_experts_;
  int64_t top_k_;
  double epsilon_;
};

}  // namespace

Support sparse_mixer_supports(const MoeSpec& spec) {
  const bool chooses = spec.top_k >= 1 && spec.top_k <= kMostChoices;
  if (chooses && spec.num_experts >= kMostChoices) return Support::yes();
  return Support::no("it chooses two experts, not " + std::to_string(spec.top_k) + " of " +
                     std::to_string(spec.num_experts));
}

std::unique_ptr<Router> make_sparse_mixer_router(const MoeSpec& spec) {
  return std::make_unique<SparseMixerRouter>(spec);
}

}  // namespace conclave::inline v0::routing
