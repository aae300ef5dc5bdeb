// AFMoE (Trinity): sigmoid with a bias for choosing, always renormalised.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"afmoe"};
constexpr std::array kOnce = {
    NamePattern{"{base}router.gate.weight", Part::kRouter},
    NamePattern{"{base}expert_bias", Part::kSelectionBias},
};

}  // namespace

constinit const Architecture kAfmoe = {
    .name = "afmoe",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.first_moe = {"num_dense_layers", 1}},
    .router = {.score = RouterScore::kSigmoid,
               .score_key = "score_func",
               .selection_bias = {.otherwise = true},
               .renormalize = {"route_norm", true},
               .epsilon = {.otherwise = 1e-20},
               .scale = {"route_scale", 1}},
    .shared = {.mode = SharedMode::kAdd, .count = {"num_shared_experts", 2}},
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
