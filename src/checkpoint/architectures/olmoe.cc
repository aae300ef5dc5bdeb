// OLMoE and FlexOlmo: every layer is MoE, no shared expert, weights renormalised only if the config
// says so.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"olmoe", "flex_olmo"};

}  // namespace

constinit const Architecture kOlmoe = {
    .name = "olmoe",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .router = {.renormalize = {"norm_topk_prob", false}},
};

}  // namespace conclave::inline v0::checkpoint
