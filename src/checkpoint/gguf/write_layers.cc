#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/written_family.h"
#include "core/shared_facts.h"

#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {
namespace {

using checkpoint::GgufFamily;
using checkpoint::GgufGating;
using checkpoint::WidthKey;
using checkpoint::WrittenFamily;

struct NamedWeight {
  WeightId id;
  std::string_view name;
};
constexpr std::array kNames = {
    NamedWeight{weights::kRouter, "ffn_gate_inp.weight"},
    NamedWeight{weights::kRouterBias, "ffn_gate_inp.bias"},
    NamedWeight{weights::kSelectionBias, "exp_probs_b.bias"},
    NamedWeight{weights::kLatentDown, "ffn_latent_down.weight"},
    NamedWeight{weights::kLatentUp, "ffn_latent_up.weight"},
    NamedWeight{weights::kGate, "ffn_gate_exps.weight"},
    NamedWeight{weights::kUp, "ffn_up_exps.weight"},
    NamedWeight{weights::kDown, "ffn_down_exps.weight"},
    NamedWeight{weights::kGate.with(WeightPlane::kBias), "ffn_gate_exps.bias"},
    NamedWeight{weights::kUp.with(WeightPlane::kBias), "ffn_up_exps.bias"},
    NamedWeight{weights::kDown.with(WeightPlane::kBias), "ffn_down_exps.bias"},
    NamedWeight{weights::kSharedGate, "ffn_gate_shexp.weight"},
    NamedWeight{weights::kSharedUp, "ffn_up_shexp.weight"},
    NamedWeight{weights::kSharedDown, "ffn_down_shexp.weight"},
    NamedWeight{weights::kSharedExpertGate, "ffn_gate_inp_shexp.weight"},
    NamedWeight{weights::kResidualGate, "ffn_gate.weight"},
    NamedWeight{weights::kResidualUp, "ffn_up.weight"},
    NamedWeight{weights::kResidualDown, "ffn_down.weight"},
};

[[noreturn]] void refuse(const Checkpoint& model, std::string what, std::string found,
                         std::string expected = {}) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(what),
                                        .file = model.directory().string(),
                                        .expected = std::move(expected),
                                        .found = std::move(found)});
}

const WrittenFamily& family_of(const Checkpoint& model) {
  const WrittenFamily* const found = checkpoint::find_written_family(model.model_type());
  if (found != nullptr) return *found;
  std::string known;
  for (const WrittenFamily& family : checkpoint::written_families()) {
    known += fmt::format("{}{}", known.empty() ? "one of " : ", ", family.model_type);
  }
  refuse(model, "no GGUF file is written of this family", model.model_type(), known);
}

// A plane of codes says how to read weights, which become values.
bool has_own_meaning(WeightId id) {
  return !id.plane() || *id.plane() == WeightPlane::kWeights || *id.plane() == WeightPlane::kBias;
}

std::vector<int64_t> shape_of(WeightId id, const WeightInfo& info) {
  const bool is_vector = info.rows == 1;
  if (id.mlp() == WeightMlp::kRouted && is_vector && id.plane() == WeightPlane::kBias) {
    return {info.count, info.cols};
  }
  if (id.mlp() == WeightMlp::kRouted) return {info.count, info.rows, info.cols};
  if (is_vector) return {info.cols};
  return {info.rows, info.cols};
}

void add_layer(const Checkpoint& model, int64_t index, GgufLayers& layers) {
  const std::unique_ptr<WeightSource> source = model.layer_source(index);
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source->describe(id);
    if (info.count == 0 || !has_own_meaning(id)) continue;
    const auto* const named = std::ranges::find(kNames, id, &NamedWeight::id);
    if (named == kNames.end()) {
      refuse(model, fmt::format("GGUF has no tensor for a weight of layer {}", index),
             to_string(id));
    }
    layers.tensors.push_back({.name = fmt::format("blk.{}.{}", index, named->name),
                              .layer = index,
                              .id = id,
                              .shape = shape_of(id, info)});
  }
}

class KeyWriter {
 public:
  KeyWriter(const Checkpoint& model, const WrittenFamily& family, std::vector<GgufKey>& keys)
      : model_(model), family_(family), keys_(keys) {}

  void write(std::span<const int64_t> layers) {
    const MoeSpec& spec = model_.layer(layers.front()).spec;
    keys_.push_back(GgufKey::of_text("general.architecture", family_.architecture));
    size("block_count", model_.num_hidden_layers());
    size("embedding_length", spec.hidden_size);
    size("leading_dense_block_count", layers.front());
    size(family_.width == WidthKey::kOfExperts ? "expert_feed_forward_length"
                                               : "feed_forward_length",
         spec.intermediate_size);
    size("expert_count", spec.num_experts);
    size("expert_used_count", spec.top_k);
    write_shared(spec);
    write_router(spec.router);
    write_activation(spec);
  }

 private:
  void size(std::string_view key, int64_t value) {
    keys_.push_back(GgufKey::of_u32(name(key), static_cast<uint32_t>(value)));
  }
  void number(std::string_view key, double value) {
    keys_.push_back(GgufKey::of_f32(name(key), static_cast<float>(value)));
  }
  std::string name(std::string_view key) const {
    return fmt::format("{}.{}", family_.architecture, key);
  }

  void write_shared(const MoeSpec& spec) {
    const int64_t width = spec.shared.intermediate_size;
    if (width == 0) return;
    const bool whole = width % spec.intermediate_size == 0;
    size("expert_shared_count", whole ? width / spec.intermediate_size : 1);
    size("expert_shared_feed_forward_length", width);
  }

  void write_router(const RouterSpec& router) {
    const GgufGating gating = router.score == RouterScore::kSigmoid ? GgufGating::kSigmoid
                              : router.score == RouterScore::kSqrtSoftplus
                                  ? GgufGating::kSqrtSoftplus
                                  : GgufGating::kSoftmax;
    size("expert_gating_func", static_cast<int64_t>(gating));
    keys_.push_back(
        GgufKey::of_bool(name("expert_weights_norm"), router.renormalize == Renormalize::kSum));
    number("expert_weights_scale", router.scale);
    if (router.num_groups <= 1) return;
    size("expert_group_count", router.num_groups);
    size("expert_group_used_count", router.topk_groups);
  }

  void write_activation(const MoeSpec& spec) {
    const auto is_clamped = [](const ActivationSpec& activation) {
      return activation.name.starts_with("silu_clamp");
    };
    if (is_clamped(spec.activation)) number("swiglu_clamp_exp", spec.activation.limit);
    const ActivationSpec& shared =
        spec.shared.activation.name.empty() ? spec.activation : spec.shared.activation;
    if (spec.shared.intermediate_size == 0) return;
    if (is_clamped(spec.activation) || is_clamped(shared)) {
      number("swiglu_clamp_shexp", shared.limit);
    }
  }

  const Checkpoint& model_;
  const WrittenFamily& family_;
  std::vector<GgufKey>& keys_;
};

// A guard of a sum of weights against 0 changes nothing else; more than this is a rule of its own.
constexpr double kLargestGuard = 1e-4;

// Softmax over the chosen logits is softmax over all, divided by the sum of the chosen.
RouterSpec in_one_order(RouterSpec router) {
  // No weight is below 0, so that the norm of order 1 is the sum.
  if (router.renormalize == Renormalize::kPNorm && router.renormalize_p == 1) {
    router.renormalize = Renormalize::kSum;
  }
  const bool is_plain =
      router.score == RouterScore::kSoftmax && !router.has_selection_bias && router.num_groups <= 1;
  if (is_plain && router.order == RouterOrder::kTopkThenScore) {
    router.order = RouterOrder::kScoreThenTopk;
    router.renormalize = Renormalize::kSum;
  }
  return router;
}

ActivationSpec activation_or(const ActivationSpec& own, const ActivationSpec& routed) {
  return own.name.empty() ? routed : own;
}

// Notes the first property that differs.
class Comparison {
 public:
  template <class T>
  void same(const char* property, const T& model, const T& file) {
    if (model != file && different_.empty()) different_ = property;
  }
  // Keys hold float32 numbers.
  void near(const char* property, double model, double file) {
    same(property, static_cast<float>(model), static_cast<float>(file));
  }
  void same_activation(const char* property, const ActivationSpec& model,
                       const ActivationSpec& file) {
    same(property, model.name, file.name);
    near(property, model.limit, file.limit);
    near(property, model.alpha, file.alpha);
    near(property, model.beta, file.beta);
    near(property, model.linear_beta, file.linear_beta);
  }
  Support result() const {
    if (different_.empty()) return Support::yes();
    return Support::no(fmt::format("layers of the family have another {} there", different_));
  }

 private:
  std::string different_;
};

void compare_routers(const RouterSpec& model, const RouterSpec& file, Comparison& compared) {
  compared.same("router", model.name, file.name);
  compared.same("score of the router", model.score, file.score);
  compared.same("order of score and choice", model.order, file.order);
  compared.same("bias of the router", model.has_logit_bias, file.has_logit_bias);
  compared.near("bound of the router's logits", model.soft_cap, file.soft_cap);
  compared.same("bias of the choice", model.has_selection_bias, file.has_selection_bias);
  compared.same("number of groups", model.num_groups, file.num_groups);
  if (model.num_groups > 1) {
    compared.same("number of groups kept", model.topk_groups, file.topk_groups);
    compared.same("score of groups", model.group_score, file.group_score);
  }
  compared.same("normalisation of weights", model.renormalize, file.renormalize);
  compared.same("guard of the sum of weights", model.epsilon > kLargestGuard,
                file.epsilon > kLargestGuard);
  compared.near("factor of weights", model.scale, file.scale);
  compared.same("scale of experts", model.has_expert_scale, file.has_expert_scale);
  compared.same("scale of the router", model.has_global_scale, file.has_global_scale);
  compared.same("norm before the router", model.input_norm.enabled, file.input_norm.enabled);
}

}  // namespace

GgufLayers gguf_layers(const Checkpoint& model, std::span<const int64_t> layers) {
  const WrittenFamily& family = family_of(model);
  GgufLayers written;
  written.architecture = family.architecture;
  KeyWriter(model, family, written.keys).write(layers);
  for (const int64_t layer : layers) add_layer(model, layer, written);
  return written;
}

Support means_the_same(const MoeSpec& model, const MoeSpec& file) {
  Comparison compared;
  compared.same("number of experts", model.num_experts, file.num_experts);
  compared.same("number of experts for a token", model.top_k, file.top_k);
  compared.same("hidden size", model.hidden_size, file.hidden_size);
  compared.same("width of experts", model.intermediate_size, file.intermediate_size);
  compare_routers(in_one_order(model.router), in_one_order(file.router), compared);
  compared.same_activation("activation", model.activation, file.activation);
  compared.same("mode of shared experts", model.shared.mode, file.shared.mode);
  if (shared_facts(model.shared).is_there) {
    compared.same("width of shared experts", model.shared.intermediate_size,
                  file.shared.intermediate_size);
    compared.same_activation("activation of shared experts",
                             activation_or(model.shared.activation, model.activation),
                             activation_or(file.shared.activation, file.activation));
    compared.same("bias of shared experts", model.shared.has_bias, file.shared.has_bias);
  }
  compared.same("bias of experts", model.has_bias, file.has_bias);
  compared.same("output bias", model.has_output_bias, file.has_output_bias);
  compared.same("number of zero experts", model.num_zero_experts, file.num_zero_experts);
  compared.same("place of the weights", model.weight_on, file.weight_on);
  compared.near("factor of the routed sum", model.output_scale, file.output_scale);
  compared.same("projection", model.latent.size, file.latent.size);
  compared.same("norm of the projection", model.latent.has_norm, file.latent.has_norm);
  compared.same("residual MLP", model.residual.intermediate_size, file.residual.intermediate_size);
  return compared.result();
}

}  // namespace conclave::inline v0
