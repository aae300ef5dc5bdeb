// Runs one MoE layer on one batch: outputs, timings, and the amount of work.
#pragma once

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/lora.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

// If both logits and ids are empty, the layer's gate routes.
struct LayerInput {
  ConstTensorView hidden;              // [T, H]
  ConstTensorView router_logits = {};  // [T, E]
  ConstTensorView topk_ids = {};       // [T, k]
  ConstTensorView topk_weights = {};   // [T, k]
  // The arguments of ForwardArgs; empty if the layer does not use them or reads hidden instead.
  ConstTensorView router_input = {};
  ConstTensorView residual_input = {};
  ConstTensorView token_ids = {};
  // Limits of the choices, as in ForwardArgs.
  int64_t top_k = 0;
  ConstTensorView banned_experts = {};  // [E + Z]
  int64_t expert_budget = 0;
  const LoraAdapter* adapter = nullptr;  // every token has it
  // The tokens of every expert-parallel rank; empty where there is one.
  std::vector<int64_t> rank_tokens = {};

  int64_t num_tokens() const { return hidden.shape[0]; }
};

// The weights of a layer's experts: how many bytes are the layer's own, how many are the source's,
// and why parts that were to be read there are not.
struct WeightMemory {
  size_t packed_bytes = 0;
  size_t in_place_bytes = 0;
  std::vector<std::string> packed_because = {};
};
WeightMemory weight_memory(const Plan& plan);
// Returns "1.21 GB packed", or "1.21 GB read in place, 0 B packed".
std::string memory_text(const WeightMemory& memory);

struct LayerRun {
  Tensor output;                     // [T, H], hidden's type
  Tensor topk_ids;                   // [T, num_slots(spec)] i32
  Tensor topk_weights;               // [T, num_slots(spec)] f32
  Tensor logits;                     // [T, num_logits(spec)] f32; none if ids were given
  std::vector<int64_t> expert_load;  // [E]
  double median_ms = 0;
  WeightMemory weights;
  int32_t tp_size = 1;  // ranks that shared each expert

  bool has_logits() const { return logits.size_bytes() > 0; }
};

// Runs one untimed forward that captures everything, then `repetitions` timed ones. `context` is
// the layer's: on a device the tensors go there and back, and times are those of a replayed graph.
// An adapter of the input must be the layer's only one.
LayerRun run_layer(const Context& context, const MoeLayer& layer, const LayerInput& input,
                   int32_t repetitions);

struct LayerWork {
  int64_t rows = 0;  // token-expert pairs that are computed
  int64_t experts_hit = 0;
  double balance = 0;       // largest expert's rows over the mean; 0 without rows
  double flops = 0;         // a multiply and an add count one each
  double weight_bytes = 0;  // for the experts hit, and for what every token uses
};
LayerWork layer_work(const MoeSpec& spec, int64_t num_tokens, std::span<const int64_t> expert_load);
// Bytes of one routed expert, as stored.
double expert_bytes(const MoeSpec& spec);

}  // namespace conclave::tool
