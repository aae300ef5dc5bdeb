// DeepSeek-V4: square root of softplus, bounded activations, the first layers routed by token id.
// Released files name the block "ffn" and have nothing before "layers".
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"deepseek_v4"};
constexpr std::array<std::string_view, 2> kBases = {"ffn.", "mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};
constexpr std::array kOnce = {
    NamePattern{"{base}gate.bias", Part::kSelectionBias},
    NamePattern{"{base}shared_experts.w1.weight", Part::kSharedGate},
    NamePattern{"{base}shared_experts.w3.weight", Part::kSharedUp},
    NamePattern{"{base}shared_experts.w2.weight", Part::kSharedDown},
};

}  // namespace

constinit const Architecture kDeepseekV4 = {
    .name = "deepseek_v4",
    .model_types = kModelTypes,
    .bases = kBases,
    .sizes = {.num_experts = {"n_routed_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.kinds = "mlp_layer_types"},
    .router = {.score = RouterScore::kSqrtSoftplus,
               .score_key = "scoring_func",
               .scores = RouterPrecision::kModel,
               .selection_bias = {.otherwise = true},
               .epsilon = {.otherwise = 1e-20},
               .scale = {"routed_scaling_factor", 1.5},
               .hash = {.first_layers = "num_hash_layers", .otherwise = 3}},
    .activation = {.form = ActivationForm::kClampBefore, .limit = {"swiglu_limit", 10}},
    .shared = {.mode = SharedMode::kAdd},
    .expert_forms = kForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
