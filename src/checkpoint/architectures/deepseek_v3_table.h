// The router of DeepSeek-V3 ("noaux_tc"): sigmoid in float32, a bias that only chooses, groups by
// the sum of their two best, renormalised and scaled. Many families differ in defaults only.
#pragma once

#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {

// Values that count if config.json leaves a key out.
struct DeepseekV3Defaults {
  int64_t first_moe = 0;
  double scale = 1;
  bool normalise = true;
  int64_t num_groups = 1;
  int64_t topk_groups = 1;
  int64_t shared_experts = 1;
};

constexpr RouterRule deepseek_v3_router(const DeepseekV3Defaults& defaults) {
  return {.score = RouterScore::kSigmoid,
          .score_key = {"scoring_func", "score_function", "moe_router_activation_func"},
          .logits = RouterPrecision::kF32,
          .selection_bias = {.otherwise = true},
          .num_groups = {{"n_group", "num_expert_group"}, defaults.num_groups},
          .topk_groups = {"topk_group", defaults.topk_groups},
          .renormalize = {{"norm_topk_prob", "moe_renormalize"}, defaults.normalise},
          .epsilon = {.otherwise = 1e-20},
          .scale = {"routed_scaling_factor", defaults.scale}};
}

constexpr Architecture deepseek_v3_table(std::string_view name,
                                         std::span<const std::string_view> types,
                                         const DeepseekV3Defaults& defaults) {
  return {
      .name = name,
      .model_types = types,
      .bases = kMlpBase,
      .sizes = {.num_experts = {"n_routed_experts", "num_experts", "num_local_experts"},
                .top_k = {"num_experts_per_tok", "num_experts_per_token"},
                .intermediate_size = "moe_intermediate_size"},
      .layer_rule = {.first_moe = {"first_k_dense_replace", defaults.first_moe},
                     .frequency = "moe_layer_freq",
                     .kinds = "mlp_layer_types"},
      .router = deepseek_v3_router(defaults),
      .shared = {.mode = SharedMode::kAdd,
                 .count = {{"n_shared_experts", "num_shared_experts"}, defaults.shared_experts}},
  };
}

}  // namespace conclave::inline v0::checkpoint
