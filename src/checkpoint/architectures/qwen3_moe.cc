// Qwen3-MoE: as Qwen2-MoE without the shared expert. Released checkpoints set norm_topk_prob; the
// published default is off.
#include "checkpoint/architectures/common_names.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"qwen3_moe"};

}  // namespace

constinit const Architecture kQwen3Moe = {
    .name = "qwen3_moe",
    .model_types = kModelTypes,
    .blocks = kMlpBlock,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.dense_layers = "mlp_only_layers", .sparse_step = "decoder_sparse_step"},
    .router = {.renormalize_key = "norm_topk_prob", .renormalize_default = false},
    .expert_forms = kProjForms,
    .once = kMlpGate,
};

}  // namespace conclave::inline v0::checkpoint
