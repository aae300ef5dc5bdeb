// The router's own weights beside the gate matrix: biases, scales, the hash table.
#pragma once

#include "conclave/routing.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Vectors, widened to float32; empty if the spec has none.
struct RouterVectors {
  std::vector<float> logit_bias;      // [num_logits]
  std::vector<float> input_scale;     // [H]
  std::vector<float> selection_bias;  // [E + Z]
  std::vector<float> expert_scale;    // [E]
  std::vector<float> global_scale;    // [1]
  std::vector<int32_t> hash_table;    // [vocab, k]

  // Valid as long as this lives unchanged.
  RouterWeights view() const;
};

// Throws Error(kInvalidArgument) for a NaN in the selection bias, which has no order.
void check_selection_bias(const WeightSource& source, const std::vector<float>& bias);

// The entries of the hash table as stored, int32 or int64. Throws Error(kExpertId) naming row and
// value for an entry outside [0, E).
std::vector<int32_t> check_hash_table(const MoeSpec& spec, const WeightSource& source,
                                      const Tensor& stored);

// Reads a source that check_source has accepted. Throws Error(kInvalidArgument) for a NaN in the
// selection bias, which has no order, and Error(kExpertId) naming row and value for a table entry
// outside [0, E).
RouterVectors read_router_vectors(const MoeSpec& spec, const WeightSource& source);

}  // namespace conclave::inline v0
