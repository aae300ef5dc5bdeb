// Step 3.5 and 3.7: separate stacks for gate and up, bounds after the activation that differ from
// layer to layer, and a shared expert outside the block.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kTypes35 = {"step3p5", "step3p5_text"};
constexpr std::array<std::string_view, 2> kTypes37 = {"step3p7", "step3p7_text"};
constexpr std::array<std::string_view, 2> kBases = {"moe.", "mlp."};
constexpr std::array<std::string_view, 1> kSharedBlock = {"share_expert."};
constexpr std::array kUnfused = {NamePattern{"moe.gate_proj.weight", Part::kGate},
                                 NamePattern{"moe.up_proj.weight", Part::kUp},
                                 NamePattern{"moe.down_proj.weight", Part::kDown}};
constexpr std::array kForms = {ExpertForm{"stacked_unfused", kUnfused}};
constexpr std::array kOnce = {
    NamePattern{"{base}router_bias", Part::kSelectionBias},
    NamePattern{"share_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"share_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"share_expert.down_proj.weight", Part::kSharedDown},
};
constexpr ActivationRule bounded(KeyNames limits) {
  return {.form = ActivationForm::kClampAfter, .limit = {limits, 0}};
}

constexpr Architecture table(std::string_view name, std::span<const std::string_view> types,
                             ScaleOn scale_on, double epsilon) {
  return {
      .name = name,
      .model_types = types,
      .bases = kBases,
      .more_blocks = kSharedBlock,
      .sizes = {.num_experts = {"moe_num_experts", "n_routed_experts", "num_local_experts"},
                .top_k = {"moe_top_k", "num_experts_per_tok"},
                .intermediate_size = "moe_intermediate_size"},
      .layer_rule = {.first_moe = {.otherwise = 3},
                     .moe_layers = "moe_layers_enum",
                     .kinds = "mlp_layer_types"},
      .router = {.score = RouterScore::kSigmoid,
                 .score_key = "moe_router_activation",
                 .logits = RouterPrecision::kStored,
                 .selection_bias = {"use_moe_router_bias", true},
                 .renormalize = {"norm_expert_weight", true},
                 .epsilon = {.otherwise = epsilon},
                 .scale = {"moe_router_scaling_factor", 1},
                 .scale_on = scale_on},
      .activation = bounded("swiglu_limits"),
      .shared = {.mode = SharedMode::kAdd,
                 .size = {{"share_expert_dim", "share_expert_dims"}, 1280},
                 .activation = bounded("swiglu_limits_shared")},
      .expert_forms = kForms,
      .once = kOnce,
  };
}

}  // namespace

constinit const Architecture kStep3p5 = table("step3p5", kTypes35, ScaleOn::kWeights, 1e-20);
constinit const Architecture kStep3p7 = table("step3p7", kTypes37, ScaleOn::kOutput, 0);

}  // namespace conclave::inline v0::checkpoint
