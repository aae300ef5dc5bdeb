// The oracle: the same layer in float64, recomputed from the same stored weights, slow and plain.
#pragma once

#include "conclave/context.h"
#include "conclave/lora.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Largest relative error of an activated value before it is rounded to a code: with float32
// sums, and with those of tensor cores. docs/quantisation.md derives both.
inline constexpr double kFloat32CodeAmbiguity = 3e-5;
inline constexpr double kTensorCoreCodeAmbiguity = 2e-3;
// That of layers on the device of this context. Throws Error(kUnsupported) for one that this build
// lacks.
CONCLAVE_API double code_ambiguity(const Context& context);

// Row-major; T rows each.
struct ReferenceResult {
  std::vector<double> logits;          // [T, num_logits(spec)]; empty if ids were given
  std::vector<int32_t> topk_ids;       // [T, num_slots(spec)]
  std::vector<double> topk_weights;    // [T, num_slots(spec)]
  std::vector<double> shared_weights;  // [T, S], for SharedMode::kRouterWeight, otherwise empty
  // The parts as they are added: they include output scale, projection, zero experts, output bias
  // and the mix of routed and shared experts. With shared_out given, out is routed + residual.
  std::vector<double> routed;    // [T, H]
  std::vector<double> shared;    // [T, H]; empty without shared experts
  std::vector<double> residual;  // [T, H]; empty without a residual MLP
  std::vector<double> output;    // [T, H] = routed + shared + residual
  // [T]: how far, in L2, ambiguous codes of activated rows may move each token. Zeros if rows are
  // not quantised, and with ReferenceArgs::code_ambiguity = 0.
  std::vector<double> allowance;
};

// Routing is recomputed from hidden through the gate, unless logits, or ids and weights, are given.
// Ids alone are weighed, as in ForwardArgs. An application's own router has no float64 rule: give
// ids and weights. With ids and weights, logits serve only to weigh shared experts
// (SharedMode::kRouterWeight).
struct ReferenceArgs {
  ConstTensorView hidden = {};         // [T, H] f32, f16, bf16, f64
  ConstTensorView router_logits = {};  // [T, num_logits(spec)]
  // [T, num_slots(spec)] int32 or int64; ids that no slot may hold contribute nothing.
  ConstTensorView topk_ids = {};
  ConstTensorView topk_weights = {};    // [T, num_slots(spec)]
  ConstTensorView router_input = {};    // this and the next two as in ForwardArgs
  ConstTensorView residual_input = {};  // [T, H]
  ConstTensorView token_ids = {};       // [T]
  int64_t top_k = 0;  // as in ForwardArgs, 0 for the spec's; so are banned_experts
  ConstTensorView banned_experts = {};
  // Adapters, and for each token the place in this list of the one that it has; -1: none.
  std::span<const LoraAdapter> adapters = {};
  ConstTensorView adapter_ids = {};  // [T] int32 or int64
  // A code is ambiguous if a relative error of this size would change it.
  double code_ambiguity = 0;
  // Tensor-parallel ranks, 1 to 2^20. Activated rows become codes slice by slice (tensor_slice), as
  // each rank has the scales of its own columns. Nothing else depends on it.
  int32_t tp_size = 1;
};

// Reads only the experts that are hit; uses the context's threads. Throws as MoeLayer::forward, and
// Error(kUnsupported) for an application's own router unless ids and weights are given.
CONCLAVE_API ReferenceResult reference_forward(const Context& context, const MoeSpec& spec,
                                               const WeightSource& source,
                                               const ReferenceArgs& args);

// Relative L2 error of each token: |actual - expected| / max(|expected|, floor), with floor =
// 1e-30. NaN if actual is not finite but expected is. `expected` [T, H] row-major. Throws
// Error(kShape).
CONCLAVE_API std::vector<double> token_errors(const ConstTensorView& actual,
                                              std::span<const double> expected);
// The largest of `errors`, counting NaN as infinity; 0 for no tokens.
CONCLAVE_API double worst(std::span<const double> errors);

// The accuracy bar of a layer: 5e-6 if weights and out are f32, 6e-3 if either is f16 or bf16
// (docs/numerics.md derives both).
CONCLAVE_API double accuracy_bar(DType weight_dtype, DType out_dtype);

// A layer's own results against float64, stage by stage: its logits against the gate product, its
// ids and weights against its logits, its output against its ids and weights. Thus a near tie can
// neither be mistaken for a wrong output nor hide one.
struct StageCheck {
  // max |logit - exact| / (|x| |w| + |bias|); rounding to logits_dtype counts as error.
  double worst_logit_error = 0;
  // Ids that differ from float64 on the same logits. Stays 0 with an application's own router,
  // which has no float64 rule.
  int64_t routing_mismatches = 0;
  // Tokens with another set of experts, and tokens with the same experts in another order.
  int64_t mismatched_tokens = 0;
  int64_t reordered_tokens = 0;
  double worst_weight_error = 0;  // relative, on the same logits
  // Relative L2 errors on the same ids and weights, less the allowance for ambiguous codes.
  std::vector<double> token_errors;
  double worst_token_error = 0;
  int64_t ambiguous_tokens = 0;  // tokens with an ambiguous code
};
struct LayerResult {
  ConstTensorView hidden = {};
  // [T, num_logits(spec)] f32 as captured; empty if routing was given.
  ConstTensorView logits = {};
  ConstTensorView topk_ids = {};      // [T, num_slots(spec)] int32
  ConstTensorView topk_weights = {};  // [T, num_slots(spec)] f32
  ConstTensorView output = {};        // [T, H]
  ConstTensorView router_input = {};  // this and the next two: given to the layer beside hidden
  ConstTensorView residual_input = {};
  ConstTensorView token_ids = {};
  int64_t top_k = 0;  // the limits that the layer was given
  ConstTensorView banned_experts = {};
  std::span<const LoraAdapter> adapters = {};  // these two as in ReferenceArgs
  ConstTensorView adapter_ids = {};
  // Ambiguity of the device that computed the result: code_ambiguity of the layer's context.
  double code_ambiguity = kFloat32CodeAmbiguity;
  int32_t tp_size = 1;  // as in ReferenceArgs: the ParallelSpec's of the layer
};
CONCLAVE_API StageCheck check_against_reference(const Context& context, const MoeSpec& spec,
                                                const WeightSource& source,
                                                const LayerResult& result);

}  // namespace conclave::inline v0
