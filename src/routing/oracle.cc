#include "routing/oracle.h"

#include "core/float_convert.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace conclave::inline v0::routing::oracle {

Scores read_logits(const double* logits, int64_t count) {
  Scores read;
  for (int64_t i = 0; i < count; ++i) {
    const bool absent = std::isnan(logits[i]) || logits[i] == -kInf;
    read.push_back(absent ? Score() : Score(logits[i]));
  }
  return read;
}

bool any_present(const Scores& scores) {
  return std::any_of(scores.begin(), scores.end(), [](const Score& s) { return s.has_value(); });
}

std::vector<int32_t> best_first(const Scores& keys) {
  std::vector<int32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t i) { return keys[static_cast<size_t>(i)].value_or(-kInf); };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return value(a) > value(b); });
  return order;
}

Scores softmax(const Scores& logits) {
  double max = -kInf;
  for (const Score& logit : logits) max = std::max(max, logit.value_or(-kInf));
  double sum = 0;
  const auto term = [max](double logit) {
    if (max == kInf) return logit == kInf ? 1.0 : 0.0;
    return std::exp(logit - max);
  };
  for (const Score& logit : logits) sum += logit ? term(*logit) : 0.0;
  Scores weights;
  for (const Score& logit : logits) weights.push_back(logit ? Score(term(*logit) / sum) : Score());
  return weights;
}

double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

namespace {

double round_score(double score, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(double_to_bf16(score));
  if (dtype == DType::kF16) return f16_to_float(double_to_f16(score));
  return score;
}

}  // namespace

Scores score(const RouterSpec& router, const Scores& logits) {
  Scores scores = router.score == RouterScore::kSoftmax ? softmax(logits) : logits;
  for (Score& value : scores) {
    if (!value) continue;
    if (router.score == RouterScore::kSigmoid) value = 1.0 / (1.0 + std::exp(-*value));
    if (router.score == RouterScore::kSqrtSoftplus) value = std::sqrt(softplus(*value));
  }
  return scores;
}

namespace {

Scores soft_capped(const RouterSpec& router, Scores logits) {
  if (router.soft_cap == 0) return logits;
  for (Score& logit : logits) {
    if (logit) logit = router.soft_cap * std::tanh(*logit / router.soft_cap);
  }
  return logits;
}

// True if scores are rounded to be compared. Logits that choose before scoring are not rounded.
bool rounds_scores(const RouterSpec& router) {
  return router.score_dtype != DType::kF32 && router.order == RouterOrder::kScoreThenTopk;
}

// True if logits may be compared in place of scores, which rise with them.
bool logits_decide(const RouterSpec& router) {
  if (router.has_selection_bias || rounds_scores(router)) return false;
  if (router.num_groups == 1) return true;
  return router.group_score == GroupScore::kMax && router.group_mask == GroupMask::kNegInf;
}

}  // namespace

Scores keys_of(const RouterSpec& router, const Scores& logits, const Scores& scores,
               const float* bias) {
  Scores keys = logits_decide(router) ? logits : scores;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!keys[i]) continue;
    if (rounds_scores(router)) keys[i] = round_score(*keys[i], router.score_dtype);
    if (bias != nullptr) keys[i] = *keys[i] + static_cast<double>(bias[i]);
    // +Inf comes before every finite score, whatever its bias.
    if (logits[i] == kInf) keys[i] = kInf;
    if (keys[i] == -kInf) keys[i].reset();
  }
  return keys;
}

namespace {

Score group_key(GroupScore kind, const Scores& members) {
  const std::vector<int32_t> order = best_first(members);
  const Score first = members[static_cast<size_t>(order[0])];
  if (kind == GroupScore::kMax || order.size() == 1) return first;
  const Score second = members[static_cast<size_t>(order[1])];
  return first && second ? Score(*first + *second) : first;
}

void limit_groups(const RouterSpec& router, Scores& keys) {
  if (router.num_groups == 1) return;
  const auto num_groups = static_cast<size_t>(router.num_groups);
  const size_t size = keys.size() / num_groups;
  Scores groups;
  for (size_t group = 0; group < num_groups; ++group) {
    const auto first = keys.begin() + static_cast<std::ptrdiff_t>(group * size);
    groups.push_back(
        group_key(router.group_score, Scores(first, first + static_cast<std::ptrdiff_t>(size))));
  }
  const std::vector<int32_t> order = best_first(groups);
  for (size_t rank = static_cast<size_t>(router.topk_groups); rank < num_groups; ++rank) {
    const size_t first = static_cast<size_t>(order[rank]) * size;
    for (size_t i = first; i < first + size; ++i) {
      if (!keys[i]) continue;
      keys[i] = router.group_mask == GroupMask::kZero ? Score(0.0) : Score();
    }
  }
}

void renormalize(const RouterSpec& router, Scores& chosen) {
  if (router.renormalize == Renormalize::kNone) return;
  if (router.renormalize == Renormalize::kSoftmax) {
    chosen = softmax(chosen);
    return;
  }
  const double p = router.renormalize == Renormalize::kPNorm ? router.renormalize_p : 1;
  const auto infinite = static_cast<double>(std::count(chosen.begin(), chosen.end(), Score(kInf)));
  if (infinite > 0) {
    for (Score& score : chosen) {
      if (score) score = *score == kInf ? std::pow(infinite, -1 / p) : 0.0;
    }
    return;
  }
  double norm = 0;
  for (const Score& score : chosen) {
    if (!score) continue;
    norm += router.renormalize == Renormalize::kPNorm ? std::pow(std::abs(*score), p) : *score;
  }
  norm = router.renormalize == Renormalize::kPNorm ? std::pow(norm, 1 / p) : norm;
  double divisor = norm + router.epsilon;
  if (router.epsilon_mode == EpsilonMode::kClampMin) divisor = std::max(norm, router.epsilon);
  if (divisor == 0) divisor = 1;
  for (Score& score : chosen) {
    if (score) score = *score / divisor;
  }
}

}  // namespace

std::vector<double> scaled(const MoeSpec& spec, const ReferenceToken& token,
                           const std::vector<int32_t>& ids, const Scores& chosen) {
  std::vector<double> weights;
  for (size_t j = 0; j < ids.size(); ++j) {
    double weight = chosen[j] ? *chosen[j] * spec.router.scale : 0.0;
    if (token.weights.global_scale != nullptr) weight *= token.weights.global_scale[0];
    if (token.weights.expert_scale != nullptr && ids[j] >= 0 && ids[j] < spec.num_experts) {
      weight *= token.weights.expert_scale[ids[j]];
    }
    weights.push_back(weight);
  }
  return weights;
}

ReferenceChoice choose_and_weigh(const MoeSpec& spec, const ReferenceToken& token,
                                 const int32_t* ids) {
  const RouterSpec& router = spec.router;
  const Scores logits = read_logits(token.logits, spec.num_experts + spec.num_zero_experts);
  const Scores capped = soft_capped(router, logits);
  const bool choose_first = router.order == RouterOrder::kTopkThenScore;
  const Scores scores = choose_first ? capped : score(router, capped);

  ReferenceChoice choice{.ids = {}, .weights = {}, .shared_weights = {}, .usable = true};
  choice.usable = any_present(logits);
  Scores keys = scores;
  if (ids != nullptr) {
    choice.ids.assign(ids, ids + spec.top_k);
  } else {
    keys = keys_of(router, logits, scores, token.weights.selection_bias);
    limit_groups(router, keys);
    choice.ids = best_first(keys);
    choice.ids.resize(static_cast<size_t>(spec.top_k));
    if (!choice.usable) std::iota(choice.ids.begin(), choice.ids.end(), 0);
  }
  Scores chosen;
  for (const int32_t id : choice.ids) {
    const bool named = id >= 0 && static_cast<size_t>(id) < scores.size();
    const auto index = static_cast<size_t>(named ? id : 0);
    chosen.push_back(named && keys[index] ? scores[index] : Score());
  }
  if (choose_first) chosen = score(router, chosen);
  renormalize(router, chosen);
  choice.weights = scaled(spec, token, choice.ids, chosen);
  return choice;
}

}  // namespace conclave::inline v0::routing::oracle
