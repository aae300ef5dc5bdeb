// MiniMax M2 and M3: sigmoid of a product in the type of the router, renormalised without an
// epsilon. M3 has a shared expert, bounded activations and a scale on the sum of the experts.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kM2Types = {"minimax_m2"};
constexpr std::array<std::string_view, 3> kM3Types = {"minimax_m3_vl", "minimax_m3_vl_text",
                                                      "minimax_m3"};
constexpr std::array<std::string_view, 2> kBases = {"block_sparse_moe.", "mlp."};
constexpr std::array kPerExpert = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"per_expert", kPerExpert}};
constexpr std::array kOnce = {NamePattern{"{base}e_score_correction_bias", Part::kSelectionBias}};

constexpr Architecture m2_table() {
  return {
      .name = "minimax_m2",
      .model_types = kM2Types,
      .bases = kBases,
      .sizes = {.num_experts = {"num_local_experts", "num_experts"},
                .top_k = "num_experts_per_tok",
                .intermediate_size = "intermediate_size"},
      .router = {.score = RouterScore::kSigmoid,
                 .score_key = "scoring_func",
                 .logits = RouterPrecision::kStored,
                 .selection_bias = {"use_routing_bias", true}},
      .expert_forms = kForms,
      .once = kOnce,
  };
}

constexpr Architecture m3_table() {
  Architecture table = m2_table();
  table.name = "minimax_m3_vl";
  table.model_types = kM3Types;
  table.layer_rule = {.frequency = "moe_layer_freq", .kinds = "mlp_layer_types"};
  table.router.scale = {"routed_scaling_factor", 2};
  table.router.scale_on = ScaleOn::kOutput;
  table.activation = {.form = ActivationForm::kSwigluOai,
                      .limit = {"swiglu_limit", 7},
                      .alpha = {"swiglu_alpha", 1.702},
                      .beta = {.otherwise = 1}};
  table.shared = {.mode = SharedMode::kAdd, .size = {"shared_intermediate_size", 3072}};
  return table;
}

}  // namespace

constinit const Architecture kMinimaxM2 = m2_table();
constinit const Architecture kMinimaxM3 = m3_table();

}  // namespace conclave::inline v0::checkpoint
