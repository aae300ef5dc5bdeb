// Grok-1: logits bounded by 30 tanh(l / 30), exact gelu, names of its own.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"grok-1", "grok_1"};
constexpr std::array<std::string_view, 1> kBases = {"moe_block."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.linear.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.linear_v.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.linear_1.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};

}  // namespace

constinit const Architecture kGrok1 = {
    .name = "grok1",
    .model_types = kModelTypes,
    .bases = kBases,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = {"num_experts_per_tok", "num_experts_per_token"},
              .intermediate_size = "intermediate_size"},
    .router = {.soft_cap = {"router_logit_softcapping", 30}},
    .activation = {.otherwise = "gelu"},
    .expert_forms = kForms,
};

}  // namespace conclave::inline v0::checkpoint
