// LongCat-Flash: softmax over experts and zero experts, which give back their input.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"
#include "io/text.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"longcat_flash"};
constexpr std::array kOnce = {
    NamePattern{"{base}router.classifier.weight", Part::kRouter},
    NamePattern{"{base}router.e_score_correction_bias", Part::kSelectionBias},
};

void require_identity(const ConfigReader& config, int64_t, MoeSpec&, Support& support) {
  const std::string type = config.text("zero_expert_type", "identity");
  if (type == "identity") return;
  support =
      Support::no("zero_expert_type " + io::show_text(type) + " is none that this version knows");
}

}  // namespace

constinit const Architecture kLongcatFlash = {
    .name = "longcat_flash",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"n_routed_experts", "num_experts", "num_local_experts"},
              .top_k = {"moe_topk", "num_experts_per_tok"},
              .intermediate_size = {"expert_ffn_hidden_size", "moe_intermediate_size"},
              .num_layers = {"num_layers", "num_hidden_layers"},
              .zero_experts = {"zero_expert_num", 256}},
    .router = {.logits = RouterPrecision::kF32,
               .logit_bias = {"router_bias", false},
               .selection_bias = {.otherwise = true},
               .renormalize = {"norm_topk_prob", false},
               .epsilon = {.otherwise = 1e-20},
               .scale = {"routed_scaling_factor", 6}},
    .once = kOnce,
    .adjust = require_identity,
};

}  // namespace conclave::inline v0::checkpoint
