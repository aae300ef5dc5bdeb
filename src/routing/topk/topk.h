// Router "topk": softmax over all experts, the k best, optionally renormalised to sum 1.
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {

// Needs 1 <= k <= E.
Support topk_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_topk_router(const MoeSpec& spec);

// One row: logits [E] -> k ids and weights, written best first.
// - Higher logit first, ties to the lower id. Softmax keeps the order of the logits, and comparing
//   logits makes no ties where exp underflows. NaN compares as -inf.
// - weight = exp(x - max) / sum, the sum over all experts, or over the k chosen ones to
// renormalise.
// - +Inf weighs as the limit: the n experts of the sum that have it share 1, all others get 0.
// - A row of nothing but NaN and -inf has no order: ids 0..k-1 with weight 0, and false is
// returned.
bool route_topk_row(const float* logits, int64_t num_experts, int64_t top_k,
                    Renormalize renormalize, int32_t* topk_ids, float* topk_weights);

}  // namespace conclave::inline v0::routing
