// Granite MoE: softmax over the chosen experts, experts as two stacks, a shared expert of its own
// name where shared_intermediate_size is not 0.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 4> kModelTypes = {"granitemoe", "granitemoeshared",
                                                         "granitemoehybrid", "granitemoe_swa"};
constexpr std::array<std::string_view, 1> kBases = {"block_sparse_moe."};
constexpr std::array<std::string_view, 1> kSharedBlock = {"shared_mlp."};
constexpr std::array kStacked = {NamePattern{"{base}input_linear.weight", Part::kGateUp},
                                 NamePattern{"{base}output_linear.weight", Part::kDown}};
constexpr std::array kForms = {ExpertForm{"stacked", kStacked}};
constexpr std::array kOnce = {
    NamePattern{"{base}router.layer.weight", Part::kRouter},
    NamePattern{"shared_mlp.input_linear.weight", Part::kSharedGateUp},
    NamePattern{"shared_mlp.output_linear.weight", Part::kSharedDown},
};

}  // namespace

constinit const Architecture kGraniteMoe = {
    .name = "granitemoe",
    .model_types = kModelTypes,
    .bases = kBases,
    .more_blocks = kSharedBlock,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .layer_rule = {.zero_experts_make_dense = true},
    .router = {.order = RouterOrder::kTopkThenScore, .renormalize = {.otherwise = false}},
    .shared = {.mode = SharedMode::kAdd, .size = {"shared_intermediate_size", 0}},
    .expert_forms = kForms,
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
