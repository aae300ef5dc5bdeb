// The parts of a layer's output in float64: routed experts, shared experts, residual MLP.
#pragma once

#include "layer/reference/adapters.h"
#include "layer/reference/float64_matrix.h"
#include "layer/reference/float64_mlp.h"

#include "conclave/context.h"
#include "conclave/reference.h"

#include <vector>

namespace conclave::inline v0 {

// How far ambiguous codes may move each token: squares of L2 lengths [T], one list per part.
struct Allowances {
  RowCodes codes;
  std::vector<double> routed;
  std::vector<double> shared;
};

// Hidden rows and the adapters of their tokens.
struct AdaptedRows {
  const Float64Matrix& hidden;
  ReferenceAdapters adapters;
};

// Each fills its field of `result` [T, H] from topk_ids, topk_weights and shared_weights there.
void run_routed(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const AdaptedRows& input, ReferenceResult& result, Allowances& allowances);
void run_shared(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const AdaptedRows& input, ReferenceResult& result, Allowances& allowances);
void run_residual(const Context& context, const MoeSpec& spec, const WeightSource& source,
                  const Float64Matrix& input, ReferenceResult& result);

// Multiplies both parts, already in `result`, by the factors of the shared experts' mode.
void mix_parts(const MoeSpec& spec, const WeightSource& source, const Float64Matrix& hidden,
               ReferenceResult& result, Allowances& allowances);

}  // namespace conclave::inline v0
