// Mixtral, and MiniMax-Text-01 and M1: every layer is MoE, weights always renormalised.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 4> kModelTypes = {"mixtral", "minimax", "minimax_text_01",
                                                         "minimax_m1"};
// transformers 5 calls the block "mlp" in memory and restores the old name when it saves, unless
// told not to.
constexpr std::array<std::string_view, 2> kBases = {"block_sparse_moe.", "mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};

}  // namespace

constinit const Architecture kMixtral = {
    .name = "mixtral",
    .model_types = kModelTypes,
    .bases = kBases,
    .sizes = {.num_experts = {"num_local_experts", "num_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .expert_forms = kForms,
};

}  // namespace conclave::inline v0::checkpoint
