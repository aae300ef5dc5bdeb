// Stage one: turns the caller's routing, or logits, into checked ids and weights.
#pragma once

#include "layer/kernel_counts.h"
#include "layer/stages/padding.h"
#include "routing/limits.h"
#include "routing/router.h"

#include "conclave/layer.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// The layer's router and what bounds its results.
struct RouteRule {
  const MoeSpec& spec;
  const Router& router;  // chooses RouteInputs::top_k experts
  routing::RouterTraits traits;
  RouterWeights weights;
  IdPolicy id_policy = IdPolicy::kStrict;
};

// Rows of a chunk.
struct RouteInputs {
  int64_t num_tokens = 0;
  int64_t first_token = 0;        // number of row 0 in the call
  const float* logits = nullptr;  // [T, num_logits], or null
  // The caller's own routing; empty where it gave none.
  ConstTensorView topk_ids;
  ConstTensorView topk_weights;
  ConstTensorView token_ids;
  Padding padding;
  // Limits of the call. Logits of banned experts are -inf already.
  int64_t top_k = 0;  // 0: the spec's
  routing::Banned banned = {};

  int64_t choices(const MoeSpec& spec) const { return top_k != 0 ? top_k : spec.top_k; }
};

struct RouteBuffers {
  int32_t* ids = nullptr;             // [T, k]
  float* weights = nullptr;           // [T, k]
  float* shared_weights = nullptr;    // [T, S]; null except for kRouterWeight and kFusedSlots
  int32_t* given_ids = nullptr;       // [T, k]
  int32_t* token_ids = nullptr;       // [T]
  std::span<std::byte> scratch = {};  // the router may use it
};

struct RouteResult {
  Routing routing;
  KernelCounts counts;
};

// Ids in the result lie in [0, E + Z) or are -1; padding tokens and slots that the call's limits
// leave empty have only -1. Shared experts have
// weights for SharedMode::kRouterWeight and kFusedSlots. The router weighs ids given without
// weights. Throws Error(kExpertId) if a custom router breaks its contract under IdPolicy::kStrict.
RouteResult route(const RouteRule& rule, const RouteInputs& inputs, const RouteBuffers& buffers,
                  Executor& executor);

// Tensors to which the caller wants a chunk's routing copied; empty where it wants none.
struct RouteCaptures {
  TensorView logits;
  TensorView ids;
  TensorView weights;
  std::span<int64_t> expert_load;
};

// Copies logits to the caller, before those of banned experts are lowered.
void capture_logits(const MoeSpec& spec, int64_t num_tokens, const float* logits,
                    const TensorView& to);
// Copies the routing to the caller and adds to the expert load.
void capture_routing(const MoeSpec& spec, const RouteInputs& inputs, const Routing& routing,
                     const RouteCaptures& captures);

}  // namespace conclave::inline v0
