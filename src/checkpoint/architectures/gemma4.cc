// Gemma 4: the router reads a scaled norm of the residual, every expert has a scale. The dense MLP
// beside the experts has norms of its own and is no part of the layer here.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kGemma4Types = {"gemma4", "gemma4_text"};
constexpr std::array<std::string_view, 2> kDiffusionTypes = {"diffusion_gemma",
                                                             "diffusion_gemma_text"};
constexpr std::array<std::string_view, 2> kBases = {"", "moe."};
constexpr std::array<std::string_view, 2> kBlocks = {"experts.", "router."};
constexpr std::array kStacked = {NamePattern{"{base}experts.gate_up_proj", Part::kGateUp},
                                 NamePattern{"{base}experts.down_proj", Part::kDown}};
constexpr std::array kForms = {ExpertForm{"stacked", kStacked}};
constexpr std::array kOnce = {
    NamePattern{"{base}router.proj.weight", Part::kRouter},
    NamePattern{"{base}router.scale", Part::kRouterInputScale},
    NamePattern{"{base}router.per_expert_scale", Part::kExpertScale},
};

constexpr Architecture table(std::string_view name, std::span<const std::string_view> types,
                             FlagKey enabled) {
  return {
      .name = name,
      .model_types = types,
      .bases = kBases,
      .more_blocks = kBlocks,
      .sizes = {.num_experts = "num_experts",
                .top_k = {"top_k_experts", "num_experts_per_tok"},
                .intermediate_size = {"moe_intermediate_size", "expert_intermediate_size"}},
      .layer_rule = {.enabled = enabled},
      .router = {.expert_scale = true, .input_norm = true},
      .activation = {.key = {"hidden_activation", "hidden_act"}, .otherwise = "gelu_pytorch_tanh"},
      .expert_forms = kForms,
      .once = kOnce,
  };
}

}  // namespace

constinit const Architecture kGemma4 = table("gemma4", kGemma4Types, {"enable_moe_block", false});
constinit const Architecture kDiffusionGemma =
    table("diffusion_gemma", kDiffusionTypes, {.otherwise = true});

}  // namespace conclave::inline v0::checkpoint
