#include "checkpoint/generic_names.h"

#include "routing/router_tensors.h"

#include <array>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// One tensor per expert and matrix, as torch.nn.Linear modules are saved.
constexpr std::array kPerExpertProj = {
    NamePattern{"{base}experts.{expert}.gate_proj.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.up_proj.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.down_proj.weight", Part::kDown},
    NamePattern{"{base}experts.{expert}.gate_proj.bias", Part::kGateBias},
    NamePattern{"{base}experts.{expert}.up_proj.bias", Part::kUpBias},
    NamePattern{"{base}experts.{expert}.down_proj.bias", Part::kDownBias},
};
constexpr std::array kPerExpertW = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
    NamePattern{"{base}experts.{expert}.w1.bias", Part::kGateBias},
    NamePattern{"{base}experts.{expert}.w3.bias", Part::kUpBias},
    NamePattern{"{base}experts.{expert}.w2.bias", Part::kDownBias},
};
constexpr std::array kPerExpertFused = {
    NamePattern{"{base}experts.{expert}.gate_up_proj.weight", Part::kGateUp},
    NamePattern{"{base}experts.{expert}.down_proj.weight", Part::kDown},
    NamePattern{"{base}experts.{expert}.gate_up_proj.bias", Part::kGateUpBias},
    NamePattern{"{base}experts.{expert}.down_proj.bias", Part::kDownBias},
};
// Three-dimensional parameters, as transformers 5 keeps them in memory and may save them.
constexpr std::array kStacked = {
    NamePattern{"{base}experts.gate_up_proj", Part::kGateUp},
    NamePattern{"{base}experts.down_proj", Part::kDown},
    NamePattern{"{base}experts.gate_up_proj_bias", Part::kGateUpBias},
    NamePattern{"{base}experts.down_proj_bias", Part::kDownBias},
};
constexpr std::array kStackedWeight = {
    NamePattern{"{base}experts.gate_up_proj.weight", Part::kGateUp},
    NamePattern{"{base}experts.down_proj.weight", Part::kDown},
    NamePattern{"{base}experts.gate_up_proj.bias", Part::kGateUpBias},
    NamePattern{"{base}experts.down_proj.bias", Part::kDownBias},
};
constexpr std::array kStackedUnfused = {
    NamePattern{"{base}experts.gate_proj", Part::kGate},
    NamePattern{"{base}experts.up_proj", Part::kUp},
    NamePattern{"{base}experts.down_proj", Part::kDown},
    NamePattern{"{base}experts.gate_proj_bias", Part::kGateBias},
    NamePattern{"{base}experts.up_proj_bias", Part::kUpBias},
    NamePattern{"{base}experts.down_proj_bias", Part::kDownBias},
};
constexpr std::array kStackedUnfusedWeight = {
    NamePattern{"{base}experts.gate_proj.weight", Part::kGate},
    NamePattern{"{base}experts.up_proj.weight", Part::kUp},
    NamePattern{"{base}experts.down_proj.weight", Part::kDown},
    NamePattern{"{base}experts.gate_proj.bias", Part::kGateBias},
    NamePattern{"{base}experts.up_proj.bias", Part::kUpBias},
    NamePattern{"{base}experts.down_proj.bias", Part::kDownBias},
};
// Used by MLX.
constexpr std::array kSwitch = {
    NamePattern{"{base}switch_mlp.gate_proj.weight", Part::kGate},
    NamePattern{"{base}switch_mlp.up_proj.weight", Part::kUp},
    NamePattern{"{base}switch_mlp.down_proj.weight", Part::kDown},
};
// Used by Granite and JetMoE.
constexpr std::array kParallelLinear = {
    NamePattern{"{base}input_linear.weight", Part::kGateUp},
    NamePattern{"{base}output_linear.weight", Part::kDown},
};
// Used by Aria.
constexpr std::array kGroupedGemm = {
    NamePattern{"{base}experts.fc1.weight", Part::kGateUp},
    NamePattern{"{base}experts.fc2.weight", Part::kDown},
};
// Used by DBRX: [E I, H] each, including down.
constexpr std::array kFlat = {
    NamePattern{.text = "{base}experts.mlp.w1",
                .part = Part::kGate,
                .axes = AxisOrder::kRowsFirst,
                .experts = ExpertAxis::kMerged},
    NamePattern{.text = "{base}experts.mlp.v1",
                .part = Part::kUp,
                .axes = AxisOrder::kRowsFirst,
                .experts = ExpertAxis::kMerged},
    NamePattern{.text = "{base}experts.mlp.w2",
                .part = Part::kDown,
                .axes = AxisOrder::kColsFirst,
                .experts = ExpertAxis::kMerged},
};
// Used by Inkling.
constexpr std::array kInterleaved = {
    NamePattern{"{base}experts.w13_weight", Part::kGateUp, RowOrder::kInterleaved},
    NamePattern{"{base}experts.w2_weight", Part::kDown},
};

constexpr std::array kForms = {
    ExpertForm{"per_expert", kPerExpertProj},
    ExpertForm{"stacked", kStacked},
    ExpertForm{"per_expert", kPerExpertW},
    ExpertForm{"per_expert_fused", kPerExpertFused},
    ExpertForm{"stacked", kStackedWeight},
    ExpertForm{"stacked_unfused", kStackedUnfused},
    ExpertForm{"stacked_unfused", kStackedUnfusedWeight},
    ExpertForm{"stacked_unfused", kSwitch},
    ExpertForm{"stacked", kParallelLinear},
    ExpertForm{"stacked", kGroupedGemm},
    ExpertForm{"flat", kFlat},
    ExpertForm{"stacked_interleaved", kInterleaved},
};

constexpr std::array kOnce = {
    NamePattern{"{base}gate.weight", Part::kRouter},
    NamePattern{"{base}router.weight", Part::kRouter},
    NamePattern{"{base}router.gate.weight", Part::kRouter},
    NamePattern{"{base}router.layer.weight", Part::kRouter},
    NamePattern{"{base}router.classifier.weight", Part::kRouter},
    NamePattern{"{base}gate.wg.weight", Part::kRouter},
    NamePattern{"{base}router.bias", Part::kRouterBias},
    NamePattern{"{base}router.classifier.bias", Part::kRouterBias},
    // The bias of the product if the family has one, otherwise the selection bias.
    NamePattern{"{base}gate.bias", Part::kRouterBias},
    NamePattern{"{base}gate.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}experts.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}router.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}moe_statics.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}gate.moe_statics.e_score_correction_bias", Part::kSelectionBias},
    NamePattern{"{base}gate.expert_bias", Part::kSelectionBias},
    NamePattern{"{base}router.expert_bias", Part::kSelectionBias},
    NamePattern{"{base}expert_bias", Part::kSelectionBias},
    NamePattern{"{base}router_bias", Part::kSelectionBias},
    NamePattern{"{base}gate.bias", Part::kSelectionBias},
    NamePattern{"{base}gate.global_scale", Part::kGlobalScale},
    NamePattern{"{base}router.per_expert_scale", Part::kExpertScale},
    NamePattern{"{base}router.scale", Part::kRouterInputScale},
    NamePattern{"{base}shared_experts.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_experts.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_experts.down_proj.weight", Part::kSharedDown},
    NamePattern{"{base}shared_experts.gate_proj.bias", Part::kSharedGateBias},
    NamePattern{"{base}shared_experts.up_proj.bias", Part::kSharedUpBias},
    NamePattern{"{base}shared_experts.down_proj.bias", Part::kSharedDownBias},
    NamePattern{"{base}shared_experts.gate_up_proj.weight", Part::kSharedGateUp},
    NamePattern{"{base}shared_experts.gate_proj", Part::kSharedGate},
    NamePattern{"{base}shared_experts.up_proj", Part::kSharedUp},
    NamePattern{"{base}shared_experts.down_proj", Part::kSharedDown},
    NamePattern{"{base}shared_experts.w1.weight", Part::kSharedGate},
    NamePattern{"{base}shared_experts.w3.weight", Part::kSharedUp},
    NamePattern{"{base}shared_experts.w2.weight", Part::kSharedDown},
    NamePattern{"{base}shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_expert.down_proj.weight", Part::kSharedDown},
    NamePattern{"{base}shared_mlp.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_mlp.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_mlp.down_proj.weight", Part::kSharedDown},
    NamePattern{"{base}shared_expert_gate.weight", Part::kSharedExpertGate},
};

// The part that is a tensor of a router's own.
Part part_of(WeightId id) {
  const size_t number = id.index() - weights::router_tensor(0).index();
  return static_cast<Part>(static_cast<size_t>(Part::kRouterTensor0) + number);
}

}  // namespace

std::span<const ExpertForm> generic_forms() { return kForms; }
std::span<const NamePattern> generic_once() { return kOnce; }

std::span<const NamePattern> router_tensor_names() {
  static const std::vector<NamePattern> patterns = [] {
    std::vector<NamePattern> made;
    for (const routing::RouterTensor* tensor : routing::all_router_tensors()) {
      if (!tensor->pattern.empty()) made.push_back({tensor->pattern, part_of(*tensor->id)});
    }
    return made;
  }();
  return patterns;
}

}  // namespace conclave::inline v0::checkpoint
