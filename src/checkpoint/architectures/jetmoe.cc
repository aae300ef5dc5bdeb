// JetMoE: softmax over the chosen experts, a bias added once to their sum. Its attention has
// experts too, which are no part of a layer here.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"jetmoe"};
constexpr std::array kStacked = {NamePattern{"{base}input_linear.weight", Part::kGateUp},
                                 NamePattern{"{base}output_linear.weight", Part::kDown}};
constexpr std::array kForms = {ExpertForm{"stacked", kStacked}};
constexpr std::array kOnce = {NamePattern{"{base}router.layer.weight", Part::kRouter},
                              NamePattern{"{base}bias", Part::kOutputBias}};

}  // namespace

constinit const Architecture kJetMoe = {
    .name = "jetmoe",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .router = {.order = RouterOrder::kTopkThenScore, .renormalize = {.otherwise = false}},
    .activation = {.key = "activation_function"},
    .output_bias = true,
    .expert_forms = kForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
