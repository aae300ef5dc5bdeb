// Scores of one row of logits, in double: a float exponential would already cost up to 8 units in
// the last place of a weight.
//
// "Absent" is what cannot be chosen for its value: a NaN or -inf logit, an id of -1. Absent
// entries are -inf here and weigh nothing.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <limits>

namespace conclave::inline v0::routing {

inline constexpr double kAbsent = -std::numeric_limits<double>::infinity();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// False for NaN and -inf.
inline bool is_present(float logit) { return logit > -std::numeric_limits<float>::infinity(); }
inline bool is_present(double score) { return score > kAbsent; }
// Whether a row has anything to order.
bool has_present(const float* logits, int64_t count);

// The logit as scored: kAbsent for what is absent, c tanh(l / c) where there is a soft cap c.
double capped(float logit, double soft_cap);

double sigmoid(double logit);
double log_sigmoid(double logit);
// sqrt(log(1 + exp(l)))
double sqrt_softplus(double logit);

// What a softmax over some logits divides by. +Inf weighs as the limit: those that have it share 1.
struct SoftmaxSum {
  double max = kAbsent;
  double sum = 0;  // of exp(l - max)
  int64_t infinite = 0;

  // 0 for an absent logit, and for all where every logit was absent.
  double weight(double logit) const;
};
SoftmaxSum softmax_sum(const float* logits, int64_t count, double soft_cap);
SoftmaxSum softmax_sum(const double* logits, int64_t count);

// How scores are formed.
struct ScoreRule {
  RouterScore score = RouterScore::kSoftmax;
  RouterOrder order = RouterOrder::kScoreThenTopk;
  double soft_cap = 0;

  // Of a layer's spec.
  static ScoreRule of(const RouterSpec& router);
};

// Scores of a whole row; the capped logits where experts are chosen first and scored after.
void score_row(const ScoreRule& rule, const float* logits, int64_t count, double* scores);
// Scores at `ids` only, -1 and absent logits absent. The same values as score_row.
void score_ids(const ScoreRule& rule, const float* logits, int64_t count, const int32_t* ids,
               int64_t num_ids, double* scores);

// Second half of RouterOrder::kTopkThenScore: the chosen logits become scores, in place.
void score_chosen(const ScoreRule& rule, int64_t count, double* chosen);

}  // namespace conclave::inline v0::routing
