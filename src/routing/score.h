// Scores of one row of logits, in double: a float exponential would already cost up to 8 units in
// the last place of a weight.
//
// An entry is "absent" if its value rules it out: a NaN or -inf logit, or an id of -1. Absent
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
// True if a row has anything to order.
bool has_present(const float* logits, int64_t count);

// The logit used for the score: kAbsent if absent, c tanh(l / c) with a soft cap c.
double capped(float logit, double soft_cap);

double sigmoid(double logit);
double log_sigmoid(double logit);
// sqrt(log(1 + exp(l)))
double sqrt_softplus(double logit);

// The divisor of a softmax over some logits. +Inf weighs as the limit: logits of +Inf share 1.
struct SoftmaxSum {
  double max = kAbsent;
  double sum = 0;  // sum of exp(l - max)
  int64_t infinite = 0;

  // Returns 0 for an absent logit, and for every logit if all are absent.
  double weight(double logit) const;
};
SoftmaxSum softmax_sum(const float* logits, int64_t count, double soft_cap);
SoftmaxSum softmax_sum(const double* logits, int64_t count);

// The rule that forms scores.
struct ScoreRule {
  RouterScore score = RouterScore::kSoftmax;
  RouterOrder order = RouterOrder::kScoreThenTopk;
  double soft_cap = 0;

  // Takes the rule from a layer's spec.
  static ScoreRule of(const RouterSpec& router);
};

// Scores of a whole row; with RouterOrder::kTopkThenScore the capped logits instead.
void score_row(const ScoreRule& rule, const float* logits, int64_t count, double* scores);
// Scores at `ids` only, with the same values as score_row; -1 and absent logits stay absent.
void score_ids(const ScoreRule& rule, const float* logits, int64_t count, const int32_t* ids,
               int64_t num_ids, double* scores);

// Second half of RouterOrder::kTopkThenScore: turns the chosen logits into scores, in place.
void score_chosen(const ScoreRule& rule, int64_t count, double* chosen);

}  // namespace conclave::inline v0::routing
