// Chooses the experts of a row: selection bias, group limit, the k best.
#pragma once

#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0::routing {

struct ChooseRule {
  int64_t num_columns = 0;  // E and zero experts
  int64_t top_k = 0;
  int64_t num_groups = 1;
  int64_t topk_groups = 1;
  GroupScore group_score = GroupScore::kTop2Sum;
  GroupMask group_mask = GroupMask::kNegInf;
  // Scores rise with logits. If nothing is added to scores and they are not rounded, logits are
  // compared: they do not tie when a score saturates or underflows.
  bool by_logit = true;
  DType score_dtype = DType::kF32;  // scores are rounded to it for the comparison

  static ChooseRule of(const MoeSpec& spec);
  bool has_groups() const { return num_groups > 1; }
  int64_t scratch_doubles() const;
};

// `scores` [columns] as score_row gives them, `bias` [columns] or null. Writes k ids and the keys
// they were compared by; a key of -inf means that nothing better was left. Scratch:
// scratch_doubles(). Whatever its bias, an absent logit compares as -inf, and a logit of +Inf
// before every finite score.
void choose_row(const ChooseRule& rule, const float* logits, const double* scores,
                const float* bias, double* scratch, int32_t* ids, double* best);

}  // namespace conclave::inline v0::routing
