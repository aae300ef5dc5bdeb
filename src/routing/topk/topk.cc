#include "routing/topk/topk.h"

#include "routing/rows.h"
#include "routing/score.h"
#include "routing/select.h"
#include "routing/topk/choose.h"
#include "routing/weigh.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::routing {
namespace {

// A softmax over all columns, divided by the sum of the chosen k, is a softmax over the chosen:
// their exponentials suffice. Only plain choices use this: others may leave the best column out.
bool is_softmax_of_chosen(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  return router.score == RouterScore::kSoftmax && router.renormalize == Renormalize::kSum &&
         router.epsilon == 0;
}

class TopkRouter final : public Router {
 public:
  explicit TopkRouter(const MoeSpec& spec)
      : score_(ScoreRule::of(spec.router)),
        weigh_(WeighRule::of(spec)),
        choose_(ChooseRule::of(spec)),
        top_k_(spec.top_k),
        plain_(choose_.by_logit && !choose_.has_groups()),
        plain_score_(score_),
        plain_weigh_(weigh_) {
    if (!is_softmax_of_chosen(spec)) return;
    plain_score_.order = RouterOrder::kTopkThenScore;
    plain_weigh_.renormalize = Renormalize::kNone;
  }

  size_t scratch_bytes(int32_t workers) const override {
    return scratch_bytes_of(scratch_doubles(), workers);
  }

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    return route_rows(input, scratch_doubles(), executor, [&](int64_t token, double* scratch) {
      const Row row{.logits = input.logits + token * input.num_logits,
                    .ids = output.topk_ids + token * top_k_,
                    .weights = output.topk_weights + token * top_k_};
      if (input.given_ids != nullptr) {
        return weigh_given(row, input.given_ids + token * top_k_, input.weights, scratch);
      }
      return plain_ ? route_plain(row, input.weights, scratch)
                    : route_general(row, input.weights, scratch);
    });
  }

 private:
  struct Row {
    const float* logits;
    int32_t* ids;
    float* weights;
  };

  int64_t scratch_doubles() const {
    return top_k_ + (plain_ ? 0 : choose_.num_columns + choose_.scratch_doubles());
  }

  // Chooses the k highest logits; only these are scored, except for a softmax over all.
  bool route_plain(const Row& row, const RouterWeights& weights, double* scratch) const {
    // The weights' memory holds the compared logits until the weights are known.
    select_best(row.logits, choose_.num_columns, top_k_, row.ids, row.weights);
    if (!is_present(row.weights[0])) return give_first_ids(top_k_, row.ids, row.weights);
    weigh_ids(plain_score_, plain_weigh_, weights, row.logits, choose_.num_columns, row.ids, top_k_,
              scratch, row.weights);
    return true;
  }

  bool route_general(const Row& row, const RouterWeights& weights, double* scratch) const {
    if (!has_present(row.logits, choose_.num_columns)) {
      return give_first_ids(top_k_, row.ids, row.weights);
    }
    double* chosen = scratch;
    double* scores = chosen + top_k_;
    score_row(score_, row.logits, choose_.num_columns, scores);
    choose_row(choose_, row.logits, scores, weights.selection_bias, scores + choose_.num_columns,
               row.ids, chosen);
    for (int64_t j = 0; j < top_k_; ++j) {
      chosen[j] = is_present(chosen[j]) ? scores[row.ids[j]] : kAbsent;
    }
    if (score_.order == RouterOrder::kTopkThenScore) score_chosen(score_, top_k_, chosen);
    weigh(weigh_, weights, row.ids, top_k_, chosen, row.weights);
    return true;
  }

  bool weigh_given(const Row& row, const int32_t* ids, const RouterWeights& weights,
                   double* scratch) const {
    std::copy_n(ids, top_k_, row.ids);
    weigh_ids(score_, weigh_, weights, row.logits, choose_.num_columns, ids, top_k_, scratch,
              row.weights);
    return has_present(row.logits, choose_.num_columns);
  }

  ScoreRule score_;
  WeighRule weigh_;
  ChooseRule choose_;
  int64_t top_k_;
  bool plain_;  // chosen by logits alone
  ScoreRule plain_score_;
  WeighRule plain_weigh_;
};

}  // namespace

Support topk_supports(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  const bool grouped = router.num_groups > 1;
  const int64_t usable =
      grouped ? router.topk_groups * (spec.num_experts / router.num_groups) : columns;
  if (spec.top_k >= 1 && spec.top_k <= usable) return Support::yes();
  return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                     std::to_string(usable) + " experts" +
                     (grouped ? " of the groups that are kept" : ""));
}

std::unique_ptr<Router> make_topk_router(const MoeSpec& spec) {
  return std::make_unique<TopkRouter>(spec);
}

}  // namespace conclave::inline v0::routing
