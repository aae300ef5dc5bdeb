// Command A MoE: the best logits, then softmax or sigmoid; shared experts added or averaged.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"
#include "io/text.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"cohere2_moe"};

// These two settings are names. norm_topk_prob applies to the sigmoid only.
void read_names(const ConfigReader& config, int64_t, MoeSpec& spec, Support& support) {
  if (spec.router.score == RouterScore::kSoftmax) spec.router.renormalize = Renormalize::kNone;
  const std::string strategy = config.text("shared_expert_combination_strategy", "average");
  if (strategy == "sum") return;
  if (strategy != "average") {
    support = Support::no("shared_expert_combination_strategy " + io::show_text(strategy) +
                          " is none that this version knows");
  }
  if (spec.shared.mode != SharedMode::kNone) spec.shared.mode = SharedMode::kAverage;
}

// The sigmoid is computed in the type of the model, softmax in float32.
const Architecture* choose_score(const ConfigReader& config) {
  return config.text("expert_selection_fn", "softmax") == "softmax" ? nullptr : &kCohere2MoeSigmoid;
}

constexpr Architecture softmax_table() {
  return {
      .name = "cohere2_moe",
      .model_types = kModelTypes,
      .bases = kMlpBase,
      .sizes = {.num_experts = {"num_experts", "num_local_experts"},
                .top_k = "num_experts_per_tok",
                .intermediate_size = "intermediate_size"},
      .layer_rule = {.first_moe = {"first_k_dense_replace", 0}, .kinds = "mlp_layer_types"},
      .router = {.score_key = "expert_selection_fn",
                 .order = RouterOrder::kTopkThenScore,
                 .renormalize = {"norm_topk_prob", true}},
      .shared = {.mode = SharedMode::kAdd, .count = {"num_shared_experts", 0}},
      .adjust = read_names,
      .choose = choose_score,
  };
}

constexpr Architecture sigmoid_table() {
  Architecture table = softmax_table();
  table.router.scores = RouterPrecision::kModel;
  table.choose = nullptr;
  return table;
}

}  // namespace

constinit const Architecture kCohere2Moe = softmax_table();
constinit const Architecture kCohere2MoeSigmoid = sigmoid_table();

}  // namespace conclave::inline v0::checkpoint
