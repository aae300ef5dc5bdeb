// Steps of the oracles in float64, on vectors. `nullopt` is an absent expert: its logit is NaN or
// -inf, or its id is no expert's. No router includes this: an oracle shares no code with the router
// that it judges.
#pragma once

#include "routing/router.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace conclave::inline v0::routing::oracle {

using Score = std::optional<double>;
using Scores = std::vector<Score>;

inline constexpr double kInf = std::numeric_limits<double>::infinity();

Scores read_logits(const double* logits, int64_t count);
bool any_present(const Scores& scores);
// Orders higher keys first, absent ones last, equal ones by position.
std::vector<int32_t> best_first(const Scores& keys);

Scores softmax(const Scores& logits);
// log(1 + exp(x))
double softplus(double x);
// The scores that RouterSpec::score names, of a whole row.
Scores score(const RouterSpec& router, const Scores& logits);

// The keys by which a row is compared.
Scores keys_of(const RouterSpec& router, const Scores& logits, const Scores& scores,
               const float* bias);
// Chosen weights times the scales of the spec and of the router's own weights.
std::vector<double> scaled(const MoeSpec& spec, const ReferenceToken& token,
                           const std::vector<int32_t>& ids, const Scores& chosen);

// Score, choose the k best, renormalise and scale; with `ids` not null these are weighed only.
ReferenceChoice choose_and_weigh(const MoeSpec& spec, const ReferenceToken& token,
                                 const int32_t* ids);

}  // namespace conclave::inline v0::routing::oracle
