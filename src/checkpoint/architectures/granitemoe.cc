// Granite MoE: softmax over the chosen experts, experts as two stacks, a shared expert with a name
// of its own if shared_intermediate_size is not 0. The hybrid form has one by default.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"granitemoe", "granitemoeshared"};
constexpr std::array<std::string_view, 1> kHybridTypes = {"granitemoehybrid"};
constexpr std::array<std::string_view, 1> kSwaTypes = {"granitemoe_swa"};
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

constexpr std::array kStackedProj = {NamePattern{"{base}experts.gate_up_proj", Part::kGateUp},
                                     NamePattern{"{base}experts.down_proj", Part::kDown}};
constexpr std::array kSwaForms = {ExpertForm{"stacked", kStackedProj}};
constexpr std::array kSwaOnce = {
    NamePattern{"{base}router.weight", Part::kRouter},
    NamePattern{"shared_mlp.input_linear.weight", Part::kSharedGateUp},
    NamePattern{"shared_mlp.output_linear.weight", Part::kSharedDown},
};

constexpr Architecture table(std::string_view name, std::span<const std::string_view> types,
                             std::span<const ExpertForm> forms, std::span<const NamePattern> once) {
  return {
      .name = name,
      .model_types = types,
      .bases = kBases,
      .more_blocks = kSharedBlock,
      .sizes = {.num_experts = "num_local_experts",
                .top_k = "num_experts_per_tok",
                .intermediate_size = "intermediate_size"},
      .layer_rule = {.zero_experts_make_dense = true},
      .router = {.order = RouterOrder::kTopkThenScore, .renormalize = {.otherwise = false}},
      .shared = {.mode = SharedMode::kAdd, .size = {"shared_intermediate_size", 0}},
      .expert_forms = forms,
      .once = once,
  };
}

constexpr Architecture hybrid_table() {
  Architecture result = table("granitemoehybrid", kHybridTypes, kForms, kOnce);
  result.shared.size.otherwise = 1024;
  return result;
}

}  // namespace

constinit const Architecture kGraniteMoe = table("granitemoe", kModelTypes, kForms, kOnce);
constinit const Architecture kGraniteMoeHybrid = hybrid_table();
// This form is saved under the names that transformers uses in memory.
constinit const Architecture kGraniteMoeSwa =
    table("granitemoe_swa", kSwaTypes, kSwaForms, kSwaOnce);

}  // namespace conclave::inline v0::checkpoint
