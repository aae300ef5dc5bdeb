// Phi-3.5-MoE: two experts, each weighed by its own softmax over the logits near its maximum.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"phimoe"};
constexpr std::array<std::string_view, 2> kBases = {"block_sparse_moe.", "mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};

}  // namespace

constinit const Architecture kPhiMoe = {
    .name = "phimoe",
    .model_types = kModelTypes,
    .bases = kBases,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .router = {.name = "sparse_mixer",
               .renormalize = {.otherwise = false},
               .jitter = {"router_jitter_noise", 0.01}},
    .expert_forms = kForms,
};

}  // namespace conclave::inline v0::checkpoint
