// The oracle: one function per step of the rule, on vectors. `nullopt` is an absent expert: its
// logit is NaN or -inf, or its id is no expert's.
#include "core/float_convert.h"
#include "core/router_rule.h"
#include "routing/router.h"

#include "conclave/error.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <optional>
#include <vector>

namespace conclave::inline v0::routing {
namespace {

using Score = std::optional<double>;
using Scores = std::vector<Score>;

constexpr double kInf = std::numeric_limits<double>::infinity();

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

// Orders higher keys first, absent ones last, equal ones by position.
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

double round_score(double score, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(double_to_bf16(score));
  if (dtype == DType::kF16) return f16_to_float(double_to_f16(score));
  return score;
}

Scores score(const RouterSpec& router, const Scores& logits) {
  Scores scores = router.score == RouterScore::kSoftmax ? softmax(logits) : logits;
  for (Score& value : scores) {
    if (!value) continue;
    if (router.score == RouterScore::kSigmoid) value = 1.0 / (1.0 + std::exp(-*value));
    if (router.score == RouterScore::kSqrtSoftplus) value = std::sqrt(softplus(*value));
  }
  return scores;
}

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

// Routers "topk" and "hash": `ids` are the given ones, or null to choose here.
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

// One round of sparse_mixer: the weight of `id` among the logits near the best of `logits`.
double mixer_weight(const Scores& logits, int32_t id, double epsilon) {
  const double max = logits[static_cast<size_t>(best_first(logits)[0])].value_or(-kInf);
  Scores near = logits;
  for (Score& logit : near) {
    if (!logit || max == kInf) continue;
    const double factor = std::max(std::abs(*logit), max);
    if ((max - *logit) / factor > 2 * epsilon) logit.reset();
  }
  const Scores weights = softmax(near);
  return id >= 0 ? weights[static_cast<size_t>(id)].value_or(0) : 0;
}

ReferenceChoice mix(const MoeSpec& spec, const ReferenceToken& token) {
  Scores logits = read_logits(token.logits, spec.num_experts);
  ReferenceChoice choice{.ids = {}, .weights = {}, .shared_weights = {}, .usable = true};
  choice.usable = any_present(logits);
  for (int round = 0; round < 2; ++round) {
    std::vector<int32_t> order = best_first(logits);
    std::erase_if(order, [&](int32_t id) { return round == 1 && id == choice.ids[0]; });
    const int32_t id = token.given_ids != nullptr ? token.given_ids[round] : order[0];
    choice.ids.push_back(id);
    choice.weights.push_back(mixer_weight(logits, id, spec.router.jitter_epsilon));
    if (id >= 0) logits[static_cast<size_t>(id)].reset();
  }
  return choice;
}

double log_sigmoid(double logit) { return -softplus(-logit); }

ReferenceChoice sink(const MoeSpec& spec, const ReferenceToken& token) {
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

uint64_t split_mix(uint64_t value) {
  uint64_t z = value + 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

Score simulated_key(const SimulatedRouting& simulated, uint64_t word, size_t expert) {
  const auto unit = [](uint64_t bits) { return std::ldexp(double(bits >> 12) + 0.5, -52); };
  switch (simulated.distribution) {
    case SimulatedDistribution::kNormal:
      return std::sqrt(-2 * std::log(unit(word))) *
             std::cos(2 * std::numbers::pi * unit(split_mix(word)));
    case SimulatedDistribution::kZipf:
      return -simulated.zipf_exponent * std::log(double(expert + 1)) -
             std::log(-std::log(unit(word)));
    default:
      return unit(word);
  }
}

ReferenceChoice simulate(const MoeSpec& spec, const ReferenceToken& token) {
  const SimulatedRouting& simulated = spec.router.simulated;
  const auto top_k = static_cast<size_t>(spec.top_k);
  ReferenceChoice choice{
      .ids = {}, .weights = std::vector(top_k, 1.0 / double(top_k)), .shared_weights = {}};
  if (token.given_ids != nullptr) {
    choice.ids.assign(token.given_ids, token.given_ids + top_k);
  } else if (simulated.distribution == SimulatedDistribution::kReplay) {
    const size_t rows = simulated.replay_ids.size() / top_k;
    const size_t first = static_cast<size_t>(token.number) % rows * top_k;
    for (size_t j = 0; j < top_k; ++j) {
      choice.ids.push_back(simulated.replay_ids[first + j]);
      if (simulated.replay_weights.empty()) continue;
      choice.weights[j] = static_cast<double>(simulated.replay_weights[first + j]);
    }
  } else {
    const uint64_t stream =
        split_mix(split_mix(simulated.seed) ^ split_mix(static_cast<uint64_t>(token.number)));
    Scores keys;
    for (size_t e = 0; e < static_cast<size_t>(spec.num_experts); ++e) {
      keys.push_back(simulated_key(simulated, split_mix(stream ^ e), e));
    }
    choice.ids = best_first(keys);
    choice.ids.resize(top_k);
  }
  return choice;
}

}  // namespace

ReferenceChoice route_reference(const MoeSpec& spec, const ReferenceToken& token) {
  switch (router_rule(spec.router.name)) {
    case RouterRule::kTopk:
      return choose_and_weigh(spec, token, token.given_ids);
    case RouterRule::kHash: {
      const int32_t* row = token.weights.hash_table;
      if (token.given_ids == nullptr) row += token.token_id * spec.top_k;
      return choose_and_weigh(spec, token, token.given_ids != nullptr ? token.given_ids : row);
    }
    case RouterRule::kSparseMixer:
      return mix(spec, token);
    case RouterRule::kSinkSoftmax:
      return sink(spec, token);
    case RouterRule::kSimulated:
      return simulate(spec, token);
    case RouterRule::kCustom:
      break;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = "the reference does not know this router", .found = spec.router.name});
}

}  // namespace conclave::inline v0::routing
