// The parts of a layer's output in float64: routed experts, shared experts, residual MLP.
#pragma once

#include "layer/reference/float64_matrix.h"

#include "conclave/context.h"
#include "conclave/reference.h"

#include <vector>

namespace conclave::inline v0 {

// What ambiguous codes may do to each token: squares of L2 lengths [T], a part each.
struct Allowances {
  double code_ambiguity = 0;
  std::vector<double> routed;
  std::vector<double> shared;
};

// Each fills its field of `result` [T, H] from topk_ids, topk_weights and shared_weights there.
void run_routed(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const Float64Matrix& hidden, ReferenceResult& result, Allowances& allowances);
void run_shared(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const Float64Matrix& hidden, ReferenceResult& result, Allowances& allowances);
void run_residual(const Context& context, const MoeSpec& spec, const WeightSource& source,
                  const Float64Matrix& input, ReferenceResult& result);

// The factors that the mode of the shared experts puts on both parts, which are there already.
void mix_parts(const MoeSpec& spec, const WeightSource& source, const Float64Matrix& hidden,
               ReferenceResult& result, Allowances& allowances);

}  // namespace conclave::inline v0
