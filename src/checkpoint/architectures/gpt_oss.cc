// gpt-oss: biases everywhere, gate and up rows alternate, softmax over the chosen experts in the
// type of the model. The privacy filter has its experts in halves and routes in float32.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kGptOssTypes = {"gpt_oss"};
constexpr std::array<std::string_view, 1> kFilterTypes = {"openai_privacy_filter"};

constexpr std::array kInterleaved = {
    NamePattern{"{base}experts.gate_up_proj", Part::kGateUp, RowOrder::kInterleaved},
    NamePattern{"{base}experts.down_proj", Part::kDown},
    NamePattern{"{base}experts.gate_up_proj_bias", Part::kGateUpBias, RowOrder::kInterleaved},
    NamePattern{"{base}experts.down_proj_bias", Part::kDownBias},
};
constexpr std::array kForms = {ExpertForm{"stacked_interleaved", kInterleaved}};
constexpr std::array kOnce = {NamePattern{"{base}router.weight", Part::kRouter},
                              NamePattern{"{base}router.bias", Part::kRouterBias}};

constexpr Architecture table(std::string_view name, std::span<const std::string_view> types) {
  return {.name = name,
          .model_types = types,
          .bases = kMlpBase,
          .sizes = {.num_experts = {"num_local_experts", "num_experts"},
                    .top_k = {"num_experts_per_tok", "experts_per_token"},
                    .intermediate_size = "intermediate_size"},
          .router = {.order = RouterOrder::kTopkThenScore,
                     .logit_bias = {.otherwise = true},
                     .renormalize = {.otherwise = false}},
          .activation = {.form = ActivationForm::kSwigluOai,
                         .limit = {"swiglu_limit", 7},
                         .alpha = {"swiglu_alpha", 1.702},
                         .beta = {.otherwise = 1}},
          .expert_bias = {.otherwise = true},
          .once = kOnce,
          .ambiguous_stack = StackOrder::kColsFirst};
}

constexpr Architecture gpt_oss_table() {
  Architecture result = table("gpt_oss", kGptOssTypes);
  result.router.scores = RouterPrecision::kModel;
  result.expert_forms = kForms;
  return result;
}

// Weights are divided by k, and the sum of the experts multiplied by it.
void share_weights(const ConfigReader&, int64_t, MoeSpec& spec, Support&) {
  spec.router.scale = 1.0 / static_cast<double>(spec.top_k);
  spec.output_scale = static_cast<double>(spec.top_k);
}

constexpr Architecture filter_table() {
  Architecture result = table("openai_privacy_filter", kFilterTypes);
  result.router.logits = RouterPrecision::kF32;
  result.adjust = share_weights;
  return result;
}

}  // namespace

constinit const Architecture kGptOss = gpt_oss_table();
constinit const Architecture kOpenaiPrivacyFilter = filter_table();

}  // namespace conclave::inline v0::checkpoint
