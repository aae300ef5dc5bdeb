// Laguna: bounded logits, sigmoid with a bias for choosing, a scale on the sum of the experts.
// moe_apply_router_weight_on_input is published as not supported, and not read.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"laguna"};
constexpr std::array kOnce = {
    NamePattern{"{base}experts.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_expert.down_proj.weight", Part::kSharedDown},
};

}  // namespace

constinit const Architecture kLaguna = {
    .name = "laguna",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.dense_layers = "mlp_only_layers",
                   .first_moe = {.otherwise = 1},
                   .kinds = "mlp_layer_types"},
    .router = {.score = RouterScore::kSigmoid,
               .selection_bias = {.otherwise = true},
               .soft_cap = {"moe_router_logit_softcapping", 0},
               .scale = {"moe_routed_scaling_factor", 1},
               .scale_on = ScaleOn::kOutput},
    .shared = {.mode = SharedMode::kAdd, .size = {"shared_expert_intermediate_size", 512}},
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
