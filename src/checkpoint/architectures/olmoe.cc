// OLMoE: every layer is MoE, no shared expert, weights renormalised only if the config says so.
#include "checkpoint/architectures/common_names.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"olmoe"};

}  // namespace

constinit const Architecture kOlmoe = {
    .name = "olmoe",
    .model_types = kModelTypes,
    .blocks = kMlpBlock,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .router = {.renormalize_key = "norm_topk_prob", .renormalize_default = false},
    .expert_forms = kProjForms,
    .once = kMlpGate,
};

}  // namespace conclave::inline v0::checkpoint
