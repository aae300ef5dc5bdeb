// The routing of the oracle: gate, ids and weights in float64.
#pragma once

#include "layer/reference/float64_matrix.h"

#include "conclave/reference.h"

namespace conclave::inline v0 {

// [T, H]: the rows that the gate reads, normalised if the spec says so.
Float64Matrix reference_gate_input(const MoeSpec& spec, const WeightSource& source,
                                   const ConstTensorView& hidden,
                                   const ConstTensorView& router_input);

// The bias of the logits, zeros if there is none.
Float64Matrix reference_logit_bias(const MoeSpec& spec, const WeightSource& source);

// Fills logits, topk_ids, topk_weights [T, num_slots] and shared_weights. An id that its slot may
// not hold becomes -1. Throws Error(kUnsupported) for a custom router, whose rule is unknown here.
void reference_routing(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
                       ReferenceResult& result);

}  // namespace conclave::inline v0
