// Llama 4: one expert per token, chosen by its logit; its sigmoid multiplies the expert's input.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"llama4", "llama4_text"};
constexpr std::array kOnce = {
    NamePattern{"{base}router.weight", Part::kRouter},
    NamePattern{"{base}shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_expert.down_proj.weight", Part::kSharedDown},
};

}  // namespace

constinit const Architecture kLlama4 = {
    .name = "llama4",
    .model_types = kModelTypes,
    .bases = kFeedForwardBase,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .layer_rule = {.sparse_step = {"interleave_moe_layer_step", 1}, .moe_layers = "moe_layers"},
    .router = {.score = RouterScore::kSigmoid,
               .order = RouterOrder::kTopkThenScore,
               .renormalize = {.otherwise = false}},
    .shared = {.mode = SharedMode::kAdd},
    .weight_on_input = {.otherwise = true},
    .once = kOnce,
    .ambiguous_stack = StackOrder::kColsFirst,
    .cols_first_words = StackWords::kUnsaid,
};

}  // namespace conclave::inline v0::checkpoint
