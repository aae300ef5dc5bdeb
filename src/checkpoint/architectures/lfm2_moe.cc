// LFM2-MoE: sigmoid in the type of the model, with or without a bias for choosing.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"lfm2_moe"};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};
constexpr std::array kOnce = {NamePattern{"{base}expert_bias", Part::kSelectionBias}};

}  // namespace

constinit const Architecture kLfm2Moe = {
    .name = "lfm2_moe",
    .model_types = kModelTypes,
    .bases = kFeedForwardBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.first_moe = {"num_dense_layers", 2}},
    .router = {.score = RouterScore::kSigmoid,
               .scores = RouterPrecision::kModel,
               .selection_bias = {"use_expert_bias", true},
               .renormalize = {"norm_topk_prob", true},
               .epsilon = {.otherwise = 1e-6},
               .scale = {"routed_scaling_factor", 1}},
    .activation = {.key = {}},
    .expert_forms = kForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
