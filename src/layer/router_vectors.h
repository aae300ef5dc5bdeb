// The router's own weights beside the gate matrix: biases, scales, and tensors of one router.
#pragma once

#include "routing/router_tensors.h"

#include "conclave/routing.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace conclave::inline v0 {

// Vectors, widened to float32; empty if the spec has none.
struct RouterVectors {
  std::vector<float> logit_bias;      // [num_logits]
  std::vector<float> input_scale;     // [H]
  std::vector<float> selection_bias;  // [E + Z]
  std::vector<float> expert_scale;    // [E]
  std::vector<float> global_scale;    // [1]

  // Tensors that only this router reads, as it reads them.
  struct Own {
    routing::SizedRouterTensor tensor;
    Tensor values;
  };
  std::vector<Own> own;

  // Valid as long as this lives unchanged.
  RouterWeights view() const;
  RouterVectors copy() const;
};

// Throws Error(kInvalidArgument) for a NaN in the selection bias, which has no order.
void check_selection_bias(const WeightSource& source, const std::vector<float>& bias);

// A tensor of the router's own as the router reads it, from its matrix as stored. Throws what the
// router's check throws for a value that it cannot take.
Tensor checked_router_tensor(const MoeSpec& spec, const WeightSource& source,
                             const routing::SizedRouterTensor& tensor, Tensor stored);

// Whether a weight of the layer is to be read.
using WantedWeights = std::function<bool(WeightId id)>;

// Reads a source that check_source has accepted, those weights that are wanted; others stay. Throws
// Error(kInvalidArgument) for a NaN in the selection bias, which has no order, and what
// checked_router_tensor throws; then all of them have stayed.
void read_router_vectors(const MoeSpec& spec, const WeightSource& source,
                         const WantedWeights& wants, RouterVectors& vectors);
// All of them.
RouterVectors read_router_vectors(const MoeSpec& spec, const WeightSource& source);

}  // namespace conclave::inline v0
