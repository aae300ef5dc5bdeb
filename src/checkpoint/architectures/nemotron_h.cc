// Nemotron-H: experts without a gate, squared relu, on a projection if moe_latent_size is given;
// the router of DeepSeek-V3.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 4> kModelTypes = {
    "nemotron_h", "nemotron_h_puzzle", "nemo_speechlm", "NemotronH_Omni_Reasoning_V3"};
constexpr std::array<std::string_view, 1> kBases = {"mixer."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.up_proj.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.down_proj.weight", Part::kDown},
    NamePattern{"{base}experts.{expert}.up_proj.bias", Part::kUpBias},
    NamePattern{"{base}experts.{expert}.down_proj.bias", Part::kDownBias},
};
constexpr std::array kTransposed = {
    NamePattern{"{base}experts.gate_and_up_projs", Part::kUp},
    NamePattern{"{base}experts.down_projs", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert},
                               ExpertForm{"stacked", kTransposed}};
constexpr std::array kOnce = {
    NamePattern{"{base}shared_experts.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_experts.down_proj.weight", Part::kSharedDown},
    NamePattern{"{base}shared_experts.up_proj.bias", Part::kSharedUpBias},
    NamePattern{"{base}shared_experts.down_proj.bias", Part::kSharedDownBias},
    NamePattern{"{base}fc1_latent_proj.weight", Part::kLatentDown},
    NamePattern{"{base}fc2_latent_proj.weight", Part::kLatentUp},
};

void refuse_latent_bias(const ConfigReader& config, int64_t, MoeSpec& spec, Support& support) {
  if (spec.latent.size == 0 || !config.flag({"mlp_bias", false})) return;
  support = Support::no("projections before and after the experts with a bias do not run");
}

constexpr Architecture table() {
  Architecture result = deepseek_v3_table("nemotron_h", kModelTypes, {});
  result.bases = kBases;
  result.sizes.latent_size = "moe_latent_size";
  result.layer_rule = {.kinds = {"layers_block_type", "layer_types"},
                       .pattern = "hybrid_override_pattern"};
  result.activation = {
      .key = "mlp_hidden_act", .otherwise = "relu2", .form = ActivationForm::kUngated};
  result.shared = {.mode = SharedMode::kAdd, .size = {"moe_shared_expert_intermediate_size", 7688}};
  result.shared_bias = {"mlp_bias", false};
  result.expert_forms = kForms;
  result.once = kOnce;
  result.ambiguous_stack = StackOrder::kColsFirst;
  result.adjust = refuse_latent_bias;
  return result;
}

}  // namespace

constinit const Architecture kNemotronH = table();

}  // namespace conclave::inline v0::checkpoint
