// Jamba: every second layer is MoE, weights are never renormalised.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"jamba"};
constexpr std::array kOnce = {NamePattern{"{base}router.weight", Part::kRouter}};

}  // namespace

constinit const Architecture kJamba = {
    .name = "jamba",
    .model_types = kModelTypes,
    .bases = kFeedForwardBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .layer_rule = {.period = {"expert_layer_period", 2}, .offset = {"expert_layer_offset", 1}},
    .router = {.renormalize = {.otherwise = false}},
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
