// One declaration a table; the definitions lie beside this file, a family or a few close ones a
// file.
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

}  // namespace conclave::inline v0::checkpoint
