#include "checkpoint/architecture.h"
#include "checkpoint/architectures/tables.h"

#include "conclave/checkpoint.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace checkpoint {
namespace {

constexpr std::array kArchitectures = {
    &kMixtral,
    &kOlmoe,
    &kJamba,
    &kGraniteMoe,
    &kGraniteMoeHybrid,
    &kGraniteMoeSwa,
    &kGptOss,
    &kOpenaiPrivacyFilter,
    &kLlama4,
    &kQwen2Moe,
    &kQwen3Next,
    &kQwen35Moe,
    &kQwen3Moe,
    &kQwen3OmniMoe,
    &kQwen3VlMoe,
    &kDeepseekV2,
    &kUnlimitedOcr,
    &kDeepseekV3,
    &kAxk1,
    &kAxk2,
    &kDots1,
    &kDots3Note,
    &kSolarOpen,
    &kMimoV2Flash,
    &kGlm4Moe,
    &kGlm4MoeLite,
    &kGlmMoeDsa,
    &kGlm5Next,
    &kHyV4,
    &kJetMoe,
    &kDbrx,
    &kPhiMoe,
    &kAria,
    &kGrok1,
    &kArctic,
    &kCohere2Moe,
    &kGemma4,
    &kDiffusionGemma,
    &kKlear,
    &kPhixtral,
    &kExaoneMoe,
    &kKimiLinear,
    &kAfmoe,
    &kLfm2Moe,
    &kLongcatFlash,
    &kStep3p5,
    &kStep3p7,
    &kLaguna,
    &kDeepseekV4,
    &kNemotronH,
    &kHunyuanV1Moe,
    &kHyV3,
    &kErnie45Moe,
    &kErnie45VlMoe,
    &kMistral4,
    &kMistralLarge4,
    &kBailingMoe,
    &kBailingMoeV2,
    &kBailingHybrid,
    &kMinimaxM2,
    &kMinimaxM3,
    &kInkling,
    &kInkling2,
    &kFlint,
    &kBeam,
    &kKolibri1,
};

}  // namespace

std::span<const Architecture* const> architectures() { return kArchitectures; }

const Architecture* find_architecture(std::string_view model_type) {
  for (const Architecture* architecture : kArchitectures) {
    const auto& types = architecture->model_types;
    if (std::find(types.begin(), types.end(), model_type) != types.end()) return architecture;
  }
  return nullptr;
}

}  // namespace checkpoint

std::vector<std::string> known_model_types() {
  std::vector<std::string> names;
  for (const checkpoint::Architecture* architecture : checkpoint::architectures()) {
    for (std::string_view type : architecture->model_types) names.emplace_back(type);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace conclave::inline v0
