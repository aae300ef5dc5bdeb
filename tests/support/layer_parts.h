// Specs with every part that a layer can have, drawn at random or named.
#pragma once

#include "support/layer_fixture.h"

#include <array>
#include <cstdint>
#include <random>
#include <string>

namespace conclave::testing {

// Every activation, with its published parameters.
inline std::array<ActivationSpec, 11> all_activations() {
  return {ActivationSpec{.name = "silu"},
          ActivationSpec{.name = "gelu"},
          ActivationSpec{.name = "gelu_tanh"},
          ActivationSpec{.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1},
          ActivationSpec{.name = "silu_clamp_before", .limit = 7},
          ActivationSpec{.name = "silu_clamp_after", .limit = 7},
          ActivationSpec{.name = "situ", .beta = 4, .linear_beta = 25},
          ActivationSpec{.name = "silu_no_mul"},
          ActivationSpec{.name = "gelu_no_mul"},
          ActivationSpec{.name = "gelu_tanh_no_mul"},
          ActivationSpec{.name = "relu2_no_mul"}};
}

// A small layer with odd sizes; `seed` determines all of its parts.
class SpecDraw {
 public:
  explicit SpecDraw(uint32_t seed) : random_(seed) {}

  MoeSpec draw() {
    MoeSpec spec = make_spec(number(1, 10), 1, number(33, 90), number(17, 64), weight_dtype());
    spec.activation = activation();
    spec.has_bias = chance(2);
    spec.has_output_bias = chance(3);
    if (chance(3)) spec.output_scale = 2.5;
    if (chance(4)) spec.num_zero_experts = number(1, 5);
    if (chance(3)) spec.latent = {.size = number(25, 56), .has_norm = chance(2)};
    if (chance(3)) spec.residual = {.intermediate_size = number(17, 56)};
    if (spec.residual.intermediate_size != 0 && chance(2)) spec.residual.activation = activation();
    draw_shared(spec);
    spec.top_k = number(1, std::min<int64_t>(5, spec.num_experts + spec.num_zero_experts));
    if (chance(4) && spec.shared.mode != SharedMode::kFusedSlots) {
      spec.weight_on = WeightOn::kInput;
      spec.router.renormalize = Renormalize::kNone;
    }
    return spec;
  }

  int64_t number(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  // Returns true once in `of` draws on average.
  bool chance(int64_t of) { return number(1, of) == 1; }

 private:
  DType weight_dtype() {
    constexpr std::array kTypes = {DType::kF32, DType::kF16, DType::kBF16};
    return kTypes[static_cast<size_t>(number(0, 2))];
  }
  ActivationSpec activation() { return all_activations()[static_cast<size_t>(number(0, 10))]; }

  void draw_shared(MoeSpec& spec) {
    constexpr std::array kModes = {SharedMode::kNone,        SharedMode::kAdd,
                                   SharedMode::kSigmoidGate, SharedMode::kAverage,
                                   SharedMode::kSoftmaxMix,  SharedMode::kFusedSlots,
                                   SharedMode::kRouterWeight};
    SharedExpertSpec& shared = spec.shared;
    shared.mode = kModes[static_cast<size_t>(number(0, 6))];
    if (shared.mode == SharedMode::kNone) return;
    shared.intermediate_size = number(17, 56);
    shared.has_bias = chance(2);
    if (chance(2)) shared.activation = activation();
    if (shared.mode == SharedMode::kFusedSlots) {
      shared.count = number(1, 3);
      shared.slot_weight = 0.75;
      spec.num_zero_experts = 0;
    }
    if (shared.mode == SharedMode::kRouterWeight) {
      shared.count = number(1, 3);
      spec.num_zero_experts = 0;
      spec.router = sink_softmax();
    }
  }

  static RouterSpec sink_softmax() {
    RouterSpec router;
    router.name = "sink_softmax";
    router.score = RouterScore::kSigmoid;
    router.has_selection_bias = true;
    return router;
  }

  std::mt19937 random_;
};

// The description that a failing draw prints.
inline std::string parts_text(const MoeSpec& spec) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  std::string text = "E" + number(spec.num_experts) + " Z" + number(spec.num_zero_experts) + " k" +
                     number(spec.top_k) + " H" + number(spec.hidden_size) + " I" +
                     number(spec.intermediate_size) + " " +
                     std::string(to_string(spec.weight_dtype)) + " " + spec.activation.name;
  if (spec.has_bias) text += " bias";
  if (spec.has_output_bias) text += " output_bias";
  if (spec.output_scale != 1) text += " scale";
  if (spec.weight_on == WeightOn::kInput) text += " weight_on_input";
  if (spec.latent.size != 0) text += " latent" + number(spec.latent.size);
  if (spec.latent.has_norm) text += "+norm";
  if (spec.residual.intermediate_size != 0) {
    text += " residual" + number(spec.residual.intermediate_size) + spec.residual.activation.name;
  }
  text += " shared mode " + number(static_cast<int64_t>(spec.shared.mode)) + " x" +
          number(spec.shared.count) + " " + spec.shared.activation.name;
  return text;
}

}  // namespace conclave::testing
