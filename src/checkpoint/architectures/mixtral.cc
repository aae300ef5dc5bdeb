// Mixtral 8x7B and 8x22B: every layer is MoE, weights always renormalised, no shared expert.
#include "checkpoint/architectures/common_names.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"mixtral"};
// transformers 5 calls the block "mlp" in memory and restores the old name when it saves, unless
// told not to.
constexpr std::array<std::string_view, 2> kBlocks = {"block_sparse_moe", "mlp"};
constexpr std::array kPerExpert = {
    NamePattern{"block_sparse_moe.experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"block_sparse_moe.experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"block_sparse_moe.experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kStacked = {
    NamePattern{"block_sparse_moe.experts.gate_up_proj", Part::kGateUp},
    NamePattern{"block_sparse_moe.experts.down_proj", Part::kDown},
};
constexpr std::array kForms = {
    ExpertForm{"per_expert", kPerExpert},
    ExpertForm{"stacked", kStacked},
    ExpertForm{"per_expert", kProjPerExpert},
    ExpertForm{"stacked", kProjStacked},
};
constexpr std::array kOnce = {
    NamePattern{"block_sparse_moe.gate.weight", Part::kRouter},
    NamePattern{"mlp.gate.weight", Part::kRouter},
};

}  // namespace

constinit const Architecture kMixtral = {
    .name = "mixtral",
    .model_types = kModelTypes,
    .blocks = kBlocks,
    .sizes = {.num_experts = {"num_local_experts", "num_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .router = {.renormalize_default = true},
    .expert_forms = kForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
