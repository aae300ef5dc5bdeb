#include "routing/topk/choose.h"

#include "core/float_convert.h"
#include "routing/score.h"
#include "routing/select.h"

#include <algorithm>

namespace conclave::inline v0::routing {
namespace {

// The key of a group: the largest of its present keys, or the two largest summed. An absent expert
// adds nothing; a group without a present expert is -inf.
double score_group(GroupScore kind, const double* keys, int64_t count) {
  double first = kAbsent;
  double second = kAbsent;
  for (int64_t i = 0; i < count; ++i) {
    second = std::max(second, std::min(first, keys[i]));
    first = std::max(first, keys[i]);
  }
  return kind == GroupScore::kTop2Sum && is_present(second) ? first + second : first;
}

// Keys of the groups that were not kept become -inf, or 0 if the family published that.
void mask_groups(const ChooseRule& rule, double* keys, double* scratch) {
  const int64_t size = rule.num_columns / rule.num_groups;
  double* group_keys = scratch;
  double* best = group_keys + rule.num_groups;
  auto* kept = static_cast<int32_t*>(static_cast<void*>(best + rule.topk_groups));
  for (int64_t group = 0; group < rule.num_groups; ++group) {
    group_keys[group] = score_group(rule.group_score, keys + group * size, size);
  }
  select_best(group_keys, rule.num_groups, rule.topk_groups, kept, best);
  std::sort(kept, kept + rule.topk_groups);
  const double masked = rule.group_mask == GroupMask::kZero ? 0.0 : kAbsent;
  for (int64_t group = 0, next = 0; group < rule.num_groups; ++group) {
    if (next < rule.topk_groups && kept[next] == group) {
      ++next;
      continue;
    }
    double* first = keys + group * size;
    for (double* key = first; key != first + size; ++key) {
      if (is_present(*key)) *key = masked;
    }
  }
}

// Rounds to 16-bit types; kF32 means no rounding.
double rounded(double score, DType dtype) {
  if (dtype == DType::kBF16) return static_cast<double>(bf16_to_float(double_to_bf16(score)));
  if (dtype == DType::kF16) return static_cast<double>(f16_to_float(double_to_f16(score)));
  return score;
}

}  // namespace

ChooseRule ChooseRule::of(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  const bool plain_groups = router.num_groups == 1 || (router.group_score == GroupScore::kMax &&
                                                       router.group_mask == GroupMask::kNegInf);
  // Experts chosen by logits are chosen before there is a score to round.
  const DType score_dtype =
      router.order == RouterOrder::kTopkThenScore ? DType::kF32 : router.score_dtype;
  return {.num_columns = spec.num_experts + spec.num_zero_experts,
          .top_k = spec.top_k,
          .num_groups = router.num_groups,
          .topk_groups = router.topk_groups,
          .group_score = router.group_score,
          .group_mask = router.group_mask,
          .by_logit = !router.has_selection_bias && score_dtype == DType::kF32 && plain_groups,
          .score_dtype = score_dtype};
}

int64_t ChooseRule::scratch_doubles() const {
  // Room for the keys, then the keys of groups, the keys of kept groups, and their ids.
  return num_columns + (has_groups() ? num_groups + 2 * topk_groups : 0);
}

void choose_row(const ChooseRule& rule, const float* logits, const double* scores,
                const float* bias, double* scratch, int32_t* ids, double* best) {
  double* keys = scratch;
  for (int64_t i = 0; i < rule.num_columns; ++i) {
    if (!is_present(logits[i])) {
      keys[i] = kAbsent;
    } else if (rule.by_logit || logits[i] == std::numeric_limits<float>::infinity()) {
      keys[i] = static_cast<double>(logits[i]);
    } else {
      keys[i] = rounded(scores[i], rule.score_dtype);
      if (bias != nullptr) keys[i] += static_cast<double>(bias[i]);
    }
  }
  if (rule.has_groups()) mask_groups(rule, keys, keys + rule.num_columns);
  select_best(keys, rule.num_columns, rule.top_k, ids, best);
}

}  // namespace conclave::inline v0::routing
