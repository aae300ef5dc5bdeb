// Phixtral: experts are the two products of a Phi MLP, with biases and without a gate.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"phi-msft", "phixtral"};
constexpr std::array<std::string_view, 2> kBases = {"moe.", "mlp."};
constexpr std::array kUnderMlp = {
    NamePattern{"{base}mlp.{expert}.fc1.weight", Part::kUp},
    NamePattern{"{base}mlp.{expert}.fc2.weight", Part::kDown},
    NamePattern{"{base}mlp.{expert}.fc1.bias", Part::kUpBias},
    NamePattern{"{base}mlp.{expert}.fc2.bias", Part::kDownBias},
};
constexpr std::array kUnderExperts = {
    NamePattern{"{base}experts.{expert}.fc1.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.fc2.weight", Part::kDown},
    NamePattern{"{base}experts.{expert}.fc1.bias", Part::kUpBias},
    NamePattern{"{base}experts.{expert}.fc2.bias", Part::kDownBias},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kUnderMlp},
                               ExpertForm{"per_expert", kUnderExperts}};

}  // namespace

constinit const Architecture kPhixtral = {
    .name = "phixtral",
    .model_types = kModelTypes,
    .layers = "h",
    .bases = kBases,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "n_inner",
              .hidden_multiple = 4,
              .hidden_size = {"n_embd", "hidden_size"},
              .num_layers = {"n_layer", "num_hidden_layers"}},
    .layer_rule = {.zero_experts_make_dense = true},  // Phi itself has the same model_type
    .router = {.order = RouterOrder::kTopkThenScore, .renormalize = {.otherwise = false}},
    .activation = {.key = {"activation_function", "hidden_act"},
                   .otherwise = "gelu_new",
                   .form = ActivationForm::kUngated},
    .expert_bias = {.otherwise = true},
    .expert_forms = kForms,
};

}  // namespace conclave::inline v0::checkpoint
