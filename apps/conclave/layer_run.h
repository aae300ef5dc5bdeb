// One MoE layer on one batch: outputs, timings, and how much work that was.
#pragma once

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::tool {

// Routing by the layer's gate where both logits and ids are empty.
struct LayerInput {
  ConstTensorView hidden;              // [T, H]
  ConstTensorView router_logits = {};  // [T, E]
  ConstTensorView topk_ids = {};       // [T, k]
  ConstTensorView topk_weights = {};   // [T, k]
  // As in ForwardArgs; empty where the layer has no use for them, or reads hidden instead.
  ConstTensorView router_input = {};
  ConstTensorView residual_input = {};
  ConstTensorView token_ids = {};

  int64_t num_tokens() const { return hidden.shape[0]; }
};

struct LayerRun {
  Tensor output;                     // [T, H], hidden's type
  Tensor topk_ids;                   // [T, num_slots(spec)] i32
  Tensor topk_weights;               // [T, num_slots(spec)] f32
  Tensor logits;                     // [T, num_logits(spec)] f32; none where ids were given
  std::vector<int64_t> expert_load;  // [E]
  double median_ms = 0;

  bool has_logits() const { return logits.size_bytes() > 0; }
};

// One untimed forward that captures everything, then `repetitions` timed ones. `context` is the
// layer's: on a device the tensors go there and back, and a time is that of a replayed graph.
LayerRun run_layer(const Context& context, const MoeLayer& layer, const LayerInput& input,
                   int32_t repetitions);

struct LayerWork {
  int64_t rows = 0;  // token-expert pairs computed
  int64_t experts_hit = 0;
  double balance = 0;       // largest expert's rows over the mean; 0 without rows
  double flops = 0;         // a multiply and an add count one each
  double weight_bytes = 0;  // of the experts hit, and of what every token uses
};
LayerWork layer_work(const MoeSpec& spec, int64_t num_tokens, std::span<const int64_t> expert_load);
// Of one routed expert, as stored.
double expert_bytes(const MoeSpec& spec);

}  // namespace conclave::tool
