// Inkling: shared experts are stacked and weighed by the router, which has a logit for each of
// them. Inkling 2 has none and bounds the halves of its activation.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kTypes = {"inkling_mm_model", "inkling_text"};
constexpr std::array<std::string_view, 2> kTypes2 = {"inkling2", "inkling2_text"};
constexpr std::array kInterleaved = {
    NamePattern{"{base}experts.w13_weight", Part::kGateUp, RowOrder::kInterleaved},
    NamePattern{"{base}experts.w2_weight", Part::kDown},
};
constexpr std::array kForms = {ExpertForm{"stacked_interleaved", kInterleaved}};
constexpr std::array kOnce = {
    NamePattern{"{base}gate.bias", Part::kSelectionBias},
    NamePattern{"{base}gate.global_scale", Part::kGlobalScale},
    NamePattern{"{base}shared_experts.shared_w13_weight", Part::kSharedGateUp,
                RowOrder::kInterleaved},
    NamePattern{"{base}shared_experts.shared_w2_weight", Part::kSharedDown},
};

// If the dense layers have a width key of their own, intermediate_size is the width of the experts.
void read_width(const ConfigReader& config, int64_t, MoeSpec& spec, Support&) {
  if (!config.find("dense_intermediate_size")) return;
  spec.intermediate_size = config.size({.key = "intermediate_size"}, {.low = 1, .high = 1 << 20});
  if (spec.shared.mode != SharedMode::kNone) {
    spec.shared.intermediate_size = spec.intermediate_size;
  }
}

constexpr Architecture table() {
  return {
      .name = "inkling",
      .model_types = kTypes,
      .bases = kMlpBase,
      .sizes = {.num_experts = {"n_routed_experts", "num_local_experts"},
                .top_k = "num_experts_per_tok",
                .intermediate_size = {"moe_intermediate_size", "intermediate_size"}},
      .layer_rule = {.first_moe = {"dense_mlp_idx", 0}, .kinds = "mlp_layer_types"},
      .router = {.name = "sink_softmax",
                 .score = RouterScore::kSigmoid,
                 .logits = RouterPrecision::kF32,
                 .selection_bias = {.otherwise = true},
                 .renormalize = {.otherwise = false},
                 .scale = {"route_scale", 8},
                 .global_scale = true},
      .shared = {.mode = SharedMode::kRouterWeight, .count = {"n_shared_experts", 2}},
      .expert_forms = kForms,
      .once = kOnce,
      .adjust = read_width,
  };
}

constexpr Architecture table2() {
  Architecture result = table();
  result.name = "inkling2";
  result.model_types = kTypes2;
  result.layer_rule = {};
  result.router = {.score = RouterScore::kSigmoid,
                   .score_key = "scoring_func",
                   .logits = RouterPrecision::kF32,
                   .selection_bias = {.otherwise = true},
                   .epsilon = {.otherwise = 1e-20},
                   .scale = {"route_scale", 8}};
  result.activation = {.form = ActivationForm::kSitu,
                       .beta = {"mlp_gate_softcap", 4},
                       .linear_beta = {"mlp_up_softcap", 25}};
  result.shared = {};
  result.adjust = nullptr;
  return result;
}

}  // namespace

constinit const Architecture kInkling = table();
constinit const Architecture kInkling2 = table2();

}  // namespace conclave::inline v0::checkpoint
