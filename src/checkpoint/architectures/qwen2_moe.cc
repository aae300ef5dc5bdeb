// Qwen1.5-MoE and Qwen2-MoE: dense layers by list or step, a shared expert behind a sigmoid gate,
// weights renormalised only if the config says so.
#include "checkpoint/architectures/common_names.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"qwen2_moe"};
constexpr std::array kOnce = {
    NamePattern{"mlp.gate.weight", Part::kRouter},
    NamePattern{"mlp.shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"mlp.shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"mlp.shared_expert.down_proj.weight", Part::kSharedDown},
    NamePattern{"mlp.shared_expert_gate.weight", Part::kSharedExpertGate},
};

}  // namespace

constinit const Architecture kQwen2Moe = {
    .name = "qwen2_moe",
    .model_types = kModelTypes,
    .blocks = kMlpBlock,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size",
              .shared_intermediate_size = "shared_expert_intermediate_size"},
    .layer_rule = {.dense_layers = "mlp_only_layers", .sparse_step = "decoder_sparse_step"},
    .router = {.renormalize_key = "norm_topk_prob", .renormalize_default = false},
    .shared = SharedMode::kSigmoidGate,
    .expert_forms = kProjForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
