// Turns the scores of the chosen experts into weights: renormalise, scale, round once.
#pragma once

#include "routing/score.h"

#include "conclave/routing.h"
#include "conclave/spec.h"

#include <cstdint>

namespace conclave::inline v0::routing {

struct WeighRule {
  Renormalize renormalize = Renormalize::kNone;
  double p = 1;
  double epsilon = 0;
  EpsilonMode epsilon_mode = EpsilonMode::kAdd;
  double scale = 1;
  int64_t num_experts = 0;  // ids from here on are zero experts, which have no expert scale

  static WeighRule of(const MoeSpec& spec);
};

// Works in place. A divisor of 0 (every score is 0 and there is no epsilon) divides nothing. Scores
// of +Inf weigh as the limit: they share the norm's total, the others get 0.
void renormalize(const WeighRule& rule, int64_t count, double* scores);

// Scores [k], absent ones kAbsent -> weights [k]. Overwrites the scores.
void weigh(const WeighRule& rule, const RouterWeights& weights, const int32_t* ids, int64_t top_k,
           double* scores, float* topk_weights);

// Scores k ids of a row of `count` logits, then weighs them. Scratch: k doubles.
void weigh_ids(const ScoreRule& score, const WeighRule& rule, const RouterWeights& weights,
               const float* logits, int64_t count, const int32_t* ids, int64_t top_k,
               double* scratch, float* topk_weights);

}  // namespace conclave::inline v0::routing
