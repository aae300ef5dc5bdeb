// One declaration per table; the definitions lie beside this file, one file per family or per group
// of close families.
#pragma once

#include "checkpoint/architecture.h"

#include <array>
#include <string_view>

namespace conclave::inline v0::checkpoint {

inline constexpr std::array<std::string_view, 1> kMlpBase = {"mlp."};
inline constexpr std::array<std::string_view, 1> kFeedForwardBase = {"feed_forward."};

// mixtral.cc, olmoe.cc, jamba.cc, granitemoe.cc, gpt_oss.cc, llama4.cc
extern const Architecture kMixtral;
extern const Architecture kOlmoe;
extern const Architecture kJamba;
extern const Architecture kGraniteMoe;
extern const Architecture kGraniteMoeHybrid;
extern const Architecture kGraniteMoeSwa;
extern const Architecture kGptOss;
extern const Architecture kOpenaiPrivacyFilter;
extern const Architecture kLlama4;
// qwen2_moe.cc, qwen3_moe.cc
extern const Architecture kQwen2Moe;
extern const Architecture kQwen3Next;
extern const Architecture kQwen35Moe;
extern const Architecture kQwen3Moe;
extern const Architecture kQwen3OmniMoe;
extern const Architecture kQwen3VlMoe;
// deepseek_v2.cc, deepseek_v3.cc, glm4_moe.cc
extern const Architecture kDeepseekV2;
extern const Architecture kUnlimitedOcr;
extern const Architecture kDeepseekV3;
extern const Architecture kAxk1;
extern const Architecture kAxk2;
extern const Architecture kDots1;
extern const Architecture kDots3Note;
extern const Architecture kSolarOpen;
extern const Architecture kMimoV2Flash;
extern const Architecture kGlm4Moe;
extern const Architecture kGlm4MoeLite;
extern const Architecture kGlmMoeDsa;
extern const Architecture kGlm5Next;
extern const Architecture kHyV4;

// one file each, named after the family
extern const Architecture kJetMoe;
extern const Architecture kDbrx;
extern const Architecture kPhiMoe;
extern const Architecture kAria;
extern const Architecture kGrok1;
extern const Architecture kArctic;
extern const Architecture kCohere2Moe;
extern const Architecture kCohere2MoeSigmoid;
extern const Architecture kGemma4;
extern const Architecture kDiffusionGemma;
extern const Architecture kKlear;
extern const Architecture kPhixtral;
extern const Architecture kExaoneMoe;
extern const Architecture kKimiLinear;
extern const Architecture kAfmoe;
extern const Architecture kLfm2Moe;
extern const Architecture kLongcatFlash;
extern const Architecture kStep3p5;
extern const Architecture kStep3p7;
extern const Architecture kLaguna;
extern const Architecture kDeepseekV4;
extern const Architecture kNemotronH;
// hunyuan.cc, ernie4_5_moe.cc, mistral4.cc, bailing_moe.cc, minimax_m2.cc, inkling.cc, flint.cc
extern const Architecture kHunyuanV1Moe;
extern const Architecture kHyV3;
extern const Architecture kErnie45Moe;
extern const Architecture kErnie45VlMoe;
extern const Architecture kErnie45VlMoeVision;
extern const Architecture kMistral4;
extern const Architecture kMistralLarge4;
extern const Architecture kBailingMoe;
extern const Architecture kBailingMoeV2;
extern const Architecture kBailingHybrid;
extern const Architecture kMinimaxM2;
extern const Architecture kMinimaxM3;
extern const Architecture kInkling;
extern const Architecture kInkling2;
extern const Architecture kFlint;
extern const Architecture kBeam;
extern const Architecture kKolibri1;

}  // namespace conclave::inline v0::checkpoint
