#include "layer/describe_stages.h"

#include "core/part_spec.h"

#include <fmt/format.h>

namespace conclave::inline v0 {
namespace {

std::string input_text(const MoeSpec& spec) {
  std::string text;
  if (spec.latent.size != 0) text = fmt::format("latent down {}", spec.latent.size);
  if (spec.weight_on == WeightOn::kInput) {
    text += text.empty() ? "weight rows" : ", weight rows";
  }
  return text;
}

std::string_view mixed_by(SharedMode mode) {
  switch (mode) {
    case SharedMode::kNone:
    case SharedMode::kAdd:
      return "added";
    case SharedMode::kSigmoidGate:
      return "by sigmoid gate";
    case SharedMode::kAverage:
      return "averaged";
    case SharedMode::kSoftmaxMix:
      return "by softmax mix";
    case SharedMode::kRouterWeight:
      return "by router weights";
    case SharedMode::kFusedSlots:
      return "by slot weights";
  }
  return "";
}

// The work of the last pass beside rounding.
std::string finish_text(const MoeSpec& spec) {
  std::string text = "finish";
  if (spec.output_scale != 1) text += fmt::format(", x {:g}", spec.output_scale);
  if (spec.num_zero_experts != 0) text += fmt::format(", {} zero experts", spec.num_zero_experts);
  if (spec.has_output_bias) text += ", output bias";
  return text;
}

}  // namespace

std::vector<std::string> describe_stages(const LayerPlan& plan) {
  const MoeSpec& spec = plan.spec;
  std::vector<std::string> stages = {"route"};
  if (plan.stages.has_expert_input) stages.push_back(input_text(spec));
  stages.emplace_back("dispatch");
  stages.push_back(
      fmt::format("experts {} {}", spec.activation.name, spec.has_bias ? "with biases" : ""));
  if (stages.back().ends_with(' ')) stages.back().pop_back();
  if (plan.shared) {
    stages.push_back(fmt::format(
        "{} shared of {} {}, {}", spec.shared.count, spec.shared.intermediate_size,
        activation_or_routed(spec.shared.activation, spec).name, mixed_by(spec.shared.mode)));
  }
  if (plan.residual) {
    stages.push_back(fmt::format("residual MLP {} {}", spec.residual.intermediate_size,
                                 activation_or_routed(spec.residual.activation, spec).name));
  }
  const std::string finish = finish_text(spec);
  if (!plan.stages.finishes_apart) {
    stages.push_back("combine and " + finish);
    return stages;
  }
  stages.emplace_back("combine");
  if (plan.part.reduces()) stages.emplace_back("sum over tensor ranks");
  if (spec.latent.has_norm) stages.emplace_back("rms norm");
  if (spec.latent.size != 0) stages.push_back(fmt::format("latent up {}", spec.hidden_size));
  stages.push_back(finish);
  return stages;
}

}  // namespace conclave::inline v0
