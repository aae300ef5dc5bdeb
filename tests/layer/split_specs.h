// Layers with every part that a split must cut, or count once.
#pragma once

#include "support/layer_fixture.h"

#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

using NamedSpec = std::pair<std::string, MoeSpec>;

// E = 5, k = 3, H = 40. `inner` is I; the other widths are close to it, and just as odd.
inline std::vector<NamedSpec> split_specs(int64_t inner, DType dtype) {
  const MoeSpec plain = make_spec(5, 3, 40, inner, dtype);
  std::vector<NamedSpec> specs = {{"Plain", plain}};
  const auto add = [&](const std::string& name, const auto& change) {
    specs.emplace_back(name, plain);
    change(specs.back().second);
  };
  const auto shared = [inner](SharedMode mode, int64_t count = 1) {
    return SharedExpertSpec{.mode = mode, .intermediate_size = inner + 2, .count = count};
  };
  add("Shared", [&](MoeSpec& s) { s.shared = shared(SharedMode::kSigmoidGate); });
  add("Average", [&](MoeSpec& s) { s.shared = shared(SharedMode::kAverage); });
  add("Mix", [&](MoeSpec& s) { s.shared = shared(SharedMode::kSoftmaxMix); });
  add("Fused", [&](MoeSpec& s) { s.shared = shared(SharedMode::kFusedSlots, 2); });
  add("Biased", [&](MoeSpec& s) {
    s.has_bias = true;
    s.has_output_bias = true;
    s.output_scale = 2.5;
    s.shared = shared(SharedMode::kAdd);
    s.shared.has_bias = true;
  });
  add("Residual", [&](MoeSpec& s) { s.residual.intermediate_size = inner + 1; });
  // A norm passes the error on to the whole token: over a handful of columns the roundings of bf16
  // rows do not average out (docs/numerics.md).
  if (inner > 8) {
    add("LatentNorm", [&](MoeSpec& s) { s.latent = {.size = 24, .has_norm = true}; });
  }
  add("Latent", [&](MoeSpec& s) {
    s.latent = {.size = 24};
    s.has_bias = true;
    s.shared = shared(SharedMode::kAdd);
  });
  add("Zero", [&](MoeSpec& s) {
    s.num_zero_experts = 2;
    s.has_output_bias = true;
  });
  add("Sinks", [&](MoeSpec& s) {
    s.router.name = "sink_softmax";
    s.router.has_selection_bias = true;
    s.shared = shared(SharedMode::kRouterWeight, 2);
  });
  add("NoGate", [&](MoeSpec& s) { s.activation.name = "relu2_no_mul"; });
  return specs;
}

}  // namespace conclave::testing
