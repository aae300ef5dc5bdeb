// Kimi Linear, and Kimi K3, whose experts work on a projection of the hidden state.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 3> kModelTypes = {"kimi_linear", "kimi_k3", "kimi_k3_text"};
constexpr std::array<std::string_view, 2> kBases = {"block_sparse_moe.", "mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};
constexpr std::array kOnce = {
    NamePattern{"{base}routed_expert_down_proj.weight", Part::kLatentDown},
    NamePattern{"{base}routed_expert_norm.weight", Part::kLatentNorm},
    NamePattern{"{base}routed_expert_up_proj.weight", Part::kLatentUp},
};

constexpr Architecture table() {
  Architecture result =
      deepseek_v3_table("kimi_linear", kModelTypes, {.first_moe = 1, .scale = 2.446});
  result.bases = kBases;
  result.sizes.latent_size = "routed_expert_hidden_size";
  result.sizes.latent_norm = {"latent_moe_use_norm", false};
  // Used by hidden_act "situ" only; a linear beta of null leaves the up half unchanged.
  result.activation.beta = {"activation_situ_beta", 1};
  result.activation.linear_beta = {"activation_situ_linear_beta", 0};
  result.expert_forms = kForms;
  result.once = kOnce;
  return result;
}

}  // namespace

constinit const Architecture kKimiLinear = table();

}  // namespace conclave::inline v0::checkpoint
