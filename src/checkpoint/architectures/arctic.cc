// Arctic: every second layer is MoE, with a dense MLP of width H beside the experts that reads
// another norm of the residual.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"arctic"};
constexpr std::array<std::string_view, 1> kBases = {"block_sparse_moe."};
constexpr std::array<std::string_view, 1> kResidualBlock = {"residual_mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};
constexpr std::array kOnce = {
    NamePattern{"residual_mlp.w1.weight", Part::kResidualGate},
    NamePattern{"residual_mlp.w3.weight", Part::kResidualUp},
    NamePattern{"residual_mlp.w2.weight", Part::kResidualDown},
};

// A single chosen expert keeps its probability.
void renormalise_several(const ConfigReader&, int64_t, MoeSpec& spec, Support&) {
  if (spec.top_k == 1) spec.router.renormalize = Renormalize::kNone;
}

}  // namespace

constinit const Architecture kArctic = {
    .name = "arctic",
    .model_types = kModelTypes,
    .bases = kBases,
    .more_blocks = kResidualBlock,
    .sizes = {.num_experts = "num_local_experts",
              .top_k = "num_experts_per_tok",
              .intermediate_size = "intermediate_size"},
    .layer_rule = {.sparse_step = {"moe_layer_frequency", 2}},
    .residual = {.enabled = {{"use_residual", "parallel_attn_mlp_res"}, false},
                 .size = "hidden_size"},
    .expert_forms = kForms,
    .once = kOnce,
    .adjust = renormalise_several,
};

}  // namespace conclave::inline v0::checkpoint
