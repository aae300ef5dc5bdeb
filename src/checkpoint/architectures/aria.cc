// Aria: softmax over the chosen experts in the type of the model, stacks columns first.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"aria", "aria_text"};
constexpr std::array kStacked = {NamePattern{"{base}experts.fc1.weight", Part::kGateUp},
                                 NamePattern{"{base}experts.fc2.weight", Part::kDown}};
constexpr std::array kForms = {ExpertForm{"stacked", kStacked}};
constexpr std::array kOnce = {NamePattern{"{base}router.weight", Part::kRouter}};

}  // namespace

constinit const Architecture kAria = {
    .name = "aria",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = "moe_num_experts",
              .top_k = "moe_topk",
              .intermediate_size = "intermediate_size"},
    .router = {.order = RouterOrder::kTopkThenScore,
               .scores = RouterPrecision::kModel,
               .renormalize = {.otherwise = false}},
    .shared = {.mode = SharedMode::kAdd, .count = {"moe_num_shared_experts", 2}},
    .shared_bias = {"mlp_bias", false},
    .expert_forms = kForms,
    .once = kOnce,
    .ambiguous_stack = StackOrder::kColsFirst,
};

}  // namespace conclave::inline v0::checkpoint
