#include "checkpoint/gguf/spec.h"

#include "checkpoint/spec_reader.h"
#include "routing/router_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 31;
// llama.cpp divides the weights by their sum, but by no less than this.
constexpr double kLeastSum = 6.103515625e-05;

bool applies(GgufRule rule, const GgufKeys& keys, std::string_view key) {
  return rule == GgufRule::kAlways || (rule == GgufRule::kKey && keys.flag(key, false));
}

GgufGating gating_of(const GgufKeys& keys, const GgufFamily& family) {
  if (family.gating_by == GgufRule::kAlways) return family.gating;
  const bool has_default = family.gating != GgufGating::kNone;
  const auto otherwise = static_cast<int64_t>(family.gating);
  return static_cast<GgufGating>(keys.size("expert_gating_func",
                                           has_default ? std::optional(otherwise) : std::nullopt,
                                           {.low = 1, .high = 4}));
}

void set_score(GgufGating gating, const GgufFamily& family, RouterSpec& router) {
  const bool of_chosen = gating == GgufGating::kSoftmaxOfChosen;
  router.score = gating == GgufGating::kSigmoid        ? RouterScore::kSigmoid
                 : gating == GgufGating::kSqrtSoftplus ? RouterScore::kSqrtSoftplus
                                                       : RouterScore::kSoftmax;
  if (of_chosen || family.chooses_logits) router.order = RouterOrder::kTopkThenScore;
}

// Groups are a setting of any architecture: the best two of a group are its score.
void set_groups(const GgufKeys& keys, int64_t num_experts, RouterSpec& router) {
  const int64_t groups = keys.size("expert_group_count", 0, {.low = 0, .high = num_experts});
  if (groups <= 1) return;
  constexpr int64_t kChosenOfAGroup = 2;
  if (num_experts % groups != 0 || num_experts / groups < kChosenOfAGroup) {
    keys.reject(ErrorCode::kConfigValue, "expert_group_count",
                {.what = "the experts do not come in groups of equal size, of two at least",
                 .found = std::to_string(groups),
                 .limit = fmt::format("a divisor of {}, the number of experts, and at most {}",
                                      num_experts, num_experts / kChosenOfAGroup)});
  }
  router.num_groups = groups;
  router.topk_groups = keys.size("expert_group_used_count", 1,
                                 {.low = 1, .high = groups, .why = ", the number of groups"});
}

RouterSpec read_router(const GgufKeys& keys, const GgufFamily& family, const GgufLayer& layer) {
  RouterSpec router;
  set_score(gating_of(keys, family), family, router);
  router.has_logit_bias = layer.has(weights::kRouterBias);
  router.has_selection_bias = layer.has(weights::kSelectionBias);
  router.has_expert_scale = layer.has(weights::kExpertScale);
  router.renormalize = Renormalize::kNone;
  if (applies(family.renormalize, keys, "expert_weights_norm")) {
    router.renormalize = Renormalize::kSum;
    router.epsilon = kLeastSum;
    router.epsilon_mode = EpsilonMode::kClampMin;
  }
  if (family.scale == GgufRule::kKey) {
    const double scale = keys.number("expert_weights_scale", 0);
    if (scale != 0) router.scale = scale;
  }
  if (family.normalises_router) {
    router.input_norm = {.enabled = true,
                         .epsilon = keys.number("attention.layer_norm_rms_epsilon", 1e-6)};
  }
  for (const routing::RouterTensor* own : routing::all_router_tensors()) {
    if (own->imply == nullptr || !layer.has(*own->id)) continue;
    own->imply(router, std::min(layer.rows(*own->id), kMaxRows));
    return router;
  }
  set_groups(keys, layer.num_experts, router);
  return router;
}

ActivationSpec bounded(const char* name, double limit) {
  if (limit <= 1e-6) return {.name = "silu"};
  return {.name = name, .limit = limit};
}

// `limit` is that of routed or of shared experts.
ActivationSpec read_activation(const GgufKeys& keys, const GgufFamily& family, bool gated,
                               double limit) {
  switch (family.activation) {
    case GgufActivation::kSilu:
      return gated ? bounded("silu_clamp_after", limit) : ActivationSpec{.name = "silu_no_mul"};
    case GgufActivation::kSiluClampBefore:
      return bounded("silu_clamp_before", limit);
    case GgufActivation::kGeluTanh:
      return {.name = gated ? "gelu_tanh" : "gelu_tanh_no_mul"};
    case GgufActivation::kSwigluOai:
      return {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
    case GgufActivation::kRelu2:
      return {.name = "relu2_no_mul"};
    case GgufActivation::kSitu:
      return {.name = "situ",
              .beta = keys.number("activation.situ_beta", 1),
              .linear_beta = keys.number("activation.situ_linear_beta", 0)};
  }
  return {};
}

void read_shared(const GgufKeys& keys, const GgufFamily& family, const GgufLayer& layer,
                 const GgufForm& form, MoeSpec& spec) {
  if (!layer.has(weights::kSharedDown)) return;
  const bool gated = layer.has(weights::kSharedGate);
  const double routed = keys.number("swiglu_clamp_exp", family.clamp_otherwise, layer.index);
  const double limit = keys.number("swiglu_clamp_shexp", routed, layer.index);
  spec.shared.mode = family.shared;
  spec.shared.intermediate_size = layer.rows(weights::kSharedUp);
  spec.shared.activation = read_activation(keys, family, gated, limit);
  if (form.shared != form.routed) spec.shared.weight_dtype = form.shared;
}

Support support_of(const GgufFamily& family, const GgufLayer& layer, const MoeSpec& spec) {
  if (!family.refused.empty()) return Support::no(std::string(family.refused));
  const bool gated = is_gated(spec.activation);
  if (gated != layer.has(weights::kGate)) {
    return Support::no("its experts have " + std::string(gated ? "no" : "a") + " gate, which \"" +
                       spec.activation.name + "\" does not fit");
  }
  if (layer.has(weights::kLatentDown) && spec.residual.intermediate_size != 0) {
    return Support::no("it has projections and a residual MLP");
  }
  return Support::yes();
}

}  // namespace

GgufSizes read_gguf_sizes(const GgufKeys& keys, const GgufFamily& family) {
  return {.num_experts = keys.size("expert_count", std::nullopt, {.low = 1, .high = kMaxExperts}),
          .hidden_size = keys.size("embedding_length", std::nullopt, {.low = 1, .high = kMaxWidth}),
          .has_residual = family.has_residual,
          .scales_experts = family.scales_experts,
          .normalises_router = family.normalises_router};
}

MoeSpec read_gguf_spec(const GgufKeys& keys, const GgufFamily& family, const GgufLayer& layer,
                       const GgufForm& form, Support& support) {
  MoeSpec spec;
  spec.num_experts = layer.num_experts;
  spec.top_k = keys.size("expert_used_count", std::nullopt,
                         {.low = 1, .high = layer.num_experts, .why = ", the number of experts"},
                         layer.index);
  spec.hidden_size = layer.stored[weights::kRouter].cols;
  spec.intermediate_size = layer.rows(weights::kUp);
  spec.weight_dtype = form.routed;
  spec.quant = form.quant;
  spec.router = read_router(keys, family, layer);
  spec.activation =
      read_activation(keys, family, layer.has(weights::kGate),
                      keys.number("swiglu_clamp_exp", family.clamp_otherwise, layer.index));
  spec.has_bias = layer.has(weights::kDown.with(WeightPlane::kBias));
  spec.weight_on = family.weight_on_input ? WeightOn::kInput : WeightOn::kOutput;
  if (layer.has(weights::kLatentDown)) {
    spec.latent = {.size = layer.rows(weights::kLatentDown),
                   .has_norm = layer.has(weights::kLatentNorm),
                   .norm_epsilon = keys.number("attention.layer_norm_rms_epsilon", 1e-6)};
  }
  read_shared(keys, family, layer, form, spec);
  if (layer.has(weights::kResidualDown)) {
    spec.residual = {.intermediate_size = layer.rows(weights::kResidualUp),
                     .weight_dtype = form.residual};
  }
  support = support_of(family, layer, spec);
  return spec;
}

}  // namespace conclave::inline v0::checkpoint
