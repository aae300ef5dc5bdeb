// The factors with which shared experts and the routed part enter a token's sum.
#pragma once

#include "core/flow.h"
#include "gemm/gate_product.h"
#include "layer/stages/padding.h"

#include "conclave/context.h"
#include "conclave/spec.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

struct SumFactors {
  const float* shared = nullptr;  // [T, S], or null: 1
  int64_t num_shared = 1;         // S
  const float* routed = nullptr;  // [T], or null: 1
};

// The weights that a mode makes its factors of; null or empty for other modes.
struct FactorWeights {
  const gemm::DenseProduct* shared_gate = nullptr;  // for kSigmoidGate
  const gemm::DenseProduct* mix_gate = nullptr;     // for kSoftmaxMix
  const std::vector<float>& mix_bias;
};

struct FactorBuffers {
  float* shared = nullptr;      // [T]
  float* routed = nullptr;      // [T]
  float* mix_logits = nullptr;  // [T, 2]
};

// `hidden` in float32, read for kSigmoidGate and kSoftmaxMix; `routed` is the router's result,
// whose shared weights count for kRouterWeight and kFusedSlots.
SumFactors make_factors(const SharedExpertSpec& spec, const FactorWeights& weights,
                        const RowBundle& hidden, const Routing& routing,
                        const FactorBuffers& buffers, Executor& executor);

// Leaves sum_i factor_i * row_i of rows [S, T, H] in the first [T, H]; zeros for padding. Changes
// nothing where every factor is 1 and no row is padding.
struct SharedRows {
  float* rows = nullptr;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
};
void weigh_shared_rows(const SharedRows& shared, const SumFactors& factors, const Padding& padding,
                       Executor& executor);

}  // namespace conclave::inline v0
