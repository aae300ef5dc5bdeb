// Tensor names that many families share.
#pragma once

#include "checkpoint/architecture.h"

#include <array>

namespace conclave::inline v0::checkpoint {

// One tensor an expert and matrix, as torch.nn.Linear modules are saved.
inline constexpr std::array kProjPerExpert = {
    NamePattern{"mlp.experts.{expert}.gate_proj.weight", Part::kGate},
    NamePattern{"mlp.experts.{expert}.up_proj.weight", Part::kUp},
    NamePattern{"mlp.experts.{expert}.down_proj.weight", Part::kDown},
};
// Three-dimensional parameters, as transformers 5 keeps them in memory and may save them.
inline constexpr std::array kProjStacked = {
    NamePattern{"mlp.experts.gate_up_proj", Part::kGateUp},
    NamePattern{"mlp.experts.down_proj", Part::kDown},
};
inline constexpr std::array kProjForms = {
    ExpertForm{"per_expert", kProjPerExpert},
    ExpertForm{"stacked", kProjStacked},
};
inline constexpr std::array kMlpGate = {NamePattern{"mlp.gate.weight", Part::kRouter}};
inline constexpr std::array<std::string_view, 1> kMlpBlock = {"mlp"};

}  // namespace conclave::inline v0::checkpoint
