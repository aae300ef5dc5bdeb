#include "checkpoint/spec_reader.h"

#include "checkpoint/layer_rule.h"
#include "core/shared_facts.h"
#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr SizeRange kWidth = {.low = 1, .high = kMaxWidth};
constexpr SizeRange kOptionalWidth = {.low = 0, .high = kMaxWidth};

// Maps names of hidden_act (left) to rows of the activation list (right), by what a form makes of
// them.
struct ActivationName {
  std::string_view config;
  std::string_view gated;
  std::string_view ungated;
  std::string_view clamped_before = {};
  std::string_view clamped_after = {};
};
constexpr std::array kActivations = {
    ActivationName{"silu", "silu", "silu_no_mul", "silu_clamp_before", "silu_clamp_after"},
    ActivationName{"swish", "silu", "silu_no_mul", "silu_clamp_before", "silu_clamp_after"},
    ActivationName{"gelu", "gelu", "gelu_no_mul"},
    ActivationName{"gelu_pytorch_tanh", "gelu_tanh", "gelu_tanh_no_mul"},
    ActivationName{"gelu_new", "gelu_tanh", "gelu_tanh_no_mul"},
    ActivationName{"gelu_fast", "gelu_tanh", "gelu_tanh_no_mul"},
    ActivationName{"relu2", "", "relu2_no_mul"},
    ActivationName{"situ", "situ", ""},
};

constexpr std::string_view kTopKField = "MoeSpec.top_k";

struct ScoreName {
  std::string_view config;
  RouterScore score;
};
constexpr std::array kScores = {ScoreName{"softmax", RouterScore::kSoftmax},
                                ScoreName{"sigmoid", RouterScore::kSigmoid},
                                ScoreName{"sqrtsoftplus", RouterScore::kSqrtSoftplus}};

std::string row_of(const ConfigReader& config, const ActivationRule& rule, Support& support) {
  const std::string name = config.text(rule.key, rule.otherwise);
  for (const ActivationName& known : kActivations) {
    if (known.config != name) continue;
    const bool ungated = rule.form == ActivationForm::kUngated;
    const std::string_view row = ungated ? known.ungated : known.gated;
    if (!row.empty()) return std::string(row);
  }
  const auto value = config.find(rule.key);
  support = Support::no(fmt::format("{} {} is not an activation this version runs",
                                    value ? value->path() : "hidden_act", io::show_text(name)));
  return name;
}

// The row of the same formula with bounds; empty if there is none.
std::string_view clamped_row(ActivationForm form, std::string_view gated) {
  const auto* const known = std::ranges::find(kActivations, gated, &ActivationName::gated);
  if (known == kActivations.end()) return {};
  return form == ActivationForm::kClampBefore ? known->clamped_before : known->clamped_after;
}

ActivationSpec read_activation(const ConfigReader& config, const ActivationRule& rule,
                               int64_t layer, Support& support) {
  const double limit = config.number(rule.limit, layer);
  const double beta = config.number(rule.beta);
  if (rule.form == ActivationForm::kSwigluOai) {
    const auto value = config.find(rule.limit.key);
    if (value && limit == 0) reject_value(*value, "is out of range", "a number above 0");
    return {.name = "swiglu_oai", .limit = limit, .alpha = config.number(rule.alpha), .beta = beta};
  }
  ActivationSpec activation;
  activation.name = rule.form == ActivationForm::kSitu ? "situ" : row_of(config, rule, support);
  if (activation.name == "situ") {
    activation.beta = beta;
    activation.linear_beta = config.number(rule.linear_beta);
  }
  const bool may_clamp =
      rule.form == ActivationForm::kClampBefore || rule.form == ActivationForm::kClampAfter;
  if (limit == 0 || !may_clamp) return activation;
  const std::string_view clamped = clamped_row(rule.form, activation.name);
  if (clamped.empty()) {
    support = Support::no(fmt::format("{} with bounds is not an activation this version runs",
                                      io::show_text(activation.name)));
    return activation;
  }
  return {.name = std::string(clamped), .limit = limit};
}

RouterScore read_score(const ConfigReader& config, const RouterRule& rule) {
  const auto value = config.find(rule.score_key);
  if (!value) return rule.score;
  for (const ScoreName& known : kScores) {
    if (known.config == value->as_string()) return known.score;
  }
  reject_value(*value, "is not a score this version knows", "softmax, sigmoid or sqrtsoftplus");
}

// Reads the limits only if there are several groups: a single one limits nothing.
void read_groups(const ConfigReader& config, const RouterRule& rule, const MoeSpec& spec,
                 RouterSpec& router) {
  const SizeRange range = {.low = 1, .high = spec.num_experts, .why = ", the number of experts"};
  router.num_groups = config.size(rule.num_groups, range);
  if (router.num_groups == 1) return;
  router.topk_groups = config.size(
      rule.topk_groups, {.low = 1, .high = router.num_groups, .why = ", the number of groups"});
  // The number may be the default for an absent key.
  const auto reject = [&](const SizeKey& key, const std::string& limit) {
    if (const auto value = config.find(key.key)) reject_value(*value, "is out of range", limit);
    throw Error(ErrorCode::kConfigValue,
                {.what = "the default number of groups does not fit the experts",
                 .file = config.object().file(),
                 .found = std::to_string(router.num_groups),
                 .limit = limit});
  };
  const int64_t in_group = spec.num_experts / router.num_groups;
  if (spec.num_experts % router.num_groups != 0) {
    reject(rule.num_groups,
           fmt::format("a divisor of {}, the number of experts", spec.num_experts));
  }
  if (in_group < 2 && rule.group_score == GroupScore::kTop2Sum) {
    reject(rule.num_groups, "at least two experts a group");
  }
  if (spec.top_k > router.topk_groups * in_group) {
    throw Error(ErrorCode::kConfigValue,
                {.what = "more experts per token than the groups kept hold",
                 .file = config.object().file(),
                 .found = fmt::format("{} experts per token", spec.top_k),
                 .limit = fmt::format("{} groups of {} experts", router.topk_groups, in_group)});
  }
}

RouterSpec read_router(const ConfigReader& config, const Architecture& architecture,
                       const MoeSpec& spec, int64_t layer) {
  const RouterRule& rule = architecture.router;
  RouterSpec router;
  router.name = rule.name;
  router.score = read_score(config, rule);
  router.order = rule.order;
  router.has_logit_bias = config.flag(rule.logit_bias);
  router.has_selection_bias = config.flag(rule.selection_bias);
  router.soft_cap = config.number(rule.soft_cap);
  router.group_score = rule.group_score;
  router.group_mask = rule.group_mask;
  read_groups(config, rule, spec, router);
  router.renormalize = config.flag(rule.renormalize) ? Renormalize::kSum : Renormalize::kNone;
  if (router.renormalize != Renormalize::kNone) {
    router.epsilon = config.number(rule.epsilon);
    router.epsilon_mode = rule.epsilon_mode;
  }
  if (rule.scale_on == ScaleOn::kWeights) router.scale = config.number(rule.scale);
  router.has_expert_scale = rule.expert_scale;
  router.has_global_scale = rule.global_scale;
  router.jitter_epsilon = config.number(rule.jitter);
  if (rule.input_norm) {
    router.input_norm = {.enabled = true, .epsilon = config.number({"rms_norm_eps", 1e-6})};
  }
  if (is_hash_layer(config, architecture, layer)) {
    router.name = "hash";
    router.has_selection_bias = false;  // the router chooses nothing
    router.vocab_size = config.size({.key = "vocab_size"}, {.low = 1, .high = kMaxWidth * 16});
  }
  return router;
}

SharedExpertSpec read_shared(const ConfigReader& config, const Architecture& architecture,
                             const MoeSpec& spec, int64_t layer, Support& support) {
  const SharedRule& rule = architecture.shared;
  SharedExpertSpec shared;
  if (!shared_facts(rule.mode).is_there || !config.flag(rule.enabled)) return shared;
  // A count that is written as null means that there are none.
  const bool null_count = config.has(rule.count.key) && !config.find(rule.count.key);
  const int64_t count =
      null_count ? 0 : config.size(rule.count, {.low = 0, .high = kMaxExperts}, layer);
  const bool as_routed = rule.size.key.empty() || (!config.find(rule.size.key) &&
                                                   !rule.count.key.empty() && !rule.size.otherwise);
  const int64_t size =
      as_routed ? spec.intermediate_size : config.size(rule.size, kOptionalWidth, layer);
  if (count == 0 || size == 0) return shared;
  if (size > kMaxWidth / count) {
    throw Error(ErrorCode::kConfigValue, {.what = "the shared experts are too wide together",
                                          .file = config.object().file(),
                                          .found = fmt::format("{} of {} columns", count, size),
                                          .limit = std::to_string(kMaxWidth)});
  }
  shared.mode = rule.mode;
  const bool apart = shared_facts(rule.mode).by_router();
  shared.count = apart ? count : 1;
  shared.intermediate_size = apart ? size : size * count;
  shared.has_bias = config.flag(architecture.shared_bias);
  if (rule.activation) {
    shared.activation = read_activation(config, *rule.activation, layer, support);
  }
  return shared;
}

void read_sizes(const ConfigReader& config, const SizeKeys& keys, int64_t layer, MoeSpec& spec) {
  spec.num_experts = config.size({.key = keys.num_experts}, {.low = 1, .high = kMaxExperts}, layer);
  if (keys.zero_experts.otherwise) {
    spec.num_zero_experts = config.size(keys.zero_experts, {.low = 0, .high = kMaxExperts});
  }
  spec.top_k = config.size({.key = keys.top_k},
                           {.low = 1,
                            .high = spec.num_experts + spec.num_zero_experts,
                            .why = ", the number of experts"},
                           layer);
  spec.hidden_size = config.size({.key = keys.hidden_size}, kWidth);
  SizeKey intermediate = {.key = keys.intermediate_size};
  if (keys.hidden_multiple > 0) intermediate.otherwise = keys.hidden_multiple * spec.hidden_size;
  spec.intermediate_size = config.size(intermediate, kWidth, layer);
  if (spec.intermediate_size > kMaxWidth) {
    reject_value(*config.find(keys.hidden_size), "is out of range",
                 std::to_string(kMaxWidth / keys.hidden_multiple));
  }
  if (keys.latent_size.empty()) return;
  spec.latent.size = config.size({keys.latent_size, 0}, kOptionalWidth);
  spec.latent.has_norm = spec.latent.size > 0 && config.flag(keys.latent_norm);
  if (spec.latent.has_norm) spec.latent.norm_epsilon = config.number({"rms_norm_eps", 1e-6});
}

void set_rounding(const RouterRule& rule, std::optional<DType> dtype, RouterSpec& router) {
  const auto type_of = [&](RouterPrecision precision) {
    return precision == RouterPrecision::kF32 ? DType::kF32 : dtype.value_or(DType::kF32);
  };
  router.logits_dtype = type_of(rule.logits);
  router.score_dtype = type_of(rule.scores);
}

// Whether the rest of the library accepts the spec. Every value was checked when it was read;
// together they may still describe a layer that only other programs run, which can be inspected.
Support runnable(const ConfigReader& config, const Architecture& architecture,
                 const MoeSpec& spec) {
  try {
    validate(spec);
    return Support::yes();
  } catch (const Error& error) {
    const ErrorDetail& detail = error.detail();
    const auto top_k = config.find(architecture.sizes.top_k);
    const bool names_top_k = top_k && detail.what.starts_with(kTopKField);
    const std::string what =
        names_top_k ? top_k->path() + detail.what.substr(kTopKField.size()) : detail.what;
    return Support::no(fmt::format("{}: {} (limit: {})", what, detail.found, detail.limit));
  }
}

}  // namespace

std::string_view config_activation(ActivationForm form, std::string_view row) {
  // Bounds, and formulas that a form stands for by itself, are no part of the name.
  if (form == ActivationForm::kSwigluOai) row = "silu";
  const bool ungated = form == ActivationForm::kUngated;
  const auto is_row = [&](const ActivationName& known) {
    if (ungated) return row == known.ungated;
    const bool is_clamped = row == known.clamped_before || row == known.clamped_after;
    return row == known.gated || (is_clamped && !row.empty());
  };
  const auto* const known = std::ranges::find_if(kActivations, is_row);
  return known == kActivations.end() ? "" : known->config;
}

std::string_view config_score(RouterScore score) {
  const auto* const known = std::ranges::find(kScores, score, &ScoreName::score);
  return known == kScores.end() ? "" : known->config;
}

MoeSpec read_spec(const ConfigReader& config, const Architecture& architecture, int64_t layer,
                  std::optional<DType> dtype, Support& support) {
  MoeSpec spec;
  read_sizes(config, architecture.sizes, layer, spec);
  spec.router = read_router(config, architecture, spec, layer);
  spec.activation = read_activation(config, architecture.activation, layer, support);
  spec.shared = read_shared(config, architecture, spec, layer, support);
  spec.has_bias = config.flag(architecture.expert_bias);
  spec.has_output_bias = architecture.output_bias;
  if (config.flag(architecture.weight_on_input)) spec.weight_on = WeightOn::kInput;
  if (architecture.router.scale_on == ScaleOn::kOutput) {
    spec.output_scale = config.number(architecture.router.scale);
  }
  if (config.flag(architecture.residual.enabled)) {
    spec.residual.intermediate_size = config.size({.key = architecture.residual.size}, kWidth);
  }
  if (architecture.adjust != nullptr) architecture.adjust(config, layer, spec, support);
  set_rounding(architecture.router, dtype, spec.router);
  if (support) support = runnable(config, architecture, spec);
  return spec;
}

}  // namespace conclave::inline v0::checkpoint
