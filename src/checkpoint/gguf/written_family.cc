#include "checkpoint/gguf/written_family.h"

#include "checkpoint/gguf/family.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

using enum WidthKey;

constexpr std::array kWritten = {
    WrittenFamily{"afmoe", "afmoe"},
    WrittenFamily{"arctic", "arctic", kOfFeedForward},
    WrittenFamily{"bailing_moe", "bailingmoe"},
    WrittenFamily{"bailing_moe_v2", "bailingmoe2"},
    WrittenFamily{"cohere2_moe", "cohere2moe"},
    WrittenFamily{"dbrx", "dbrx", kOfFeedForward, &kDbrxTrunk, "DbrxForCausalLM"},
    WrittenFamily{"deepseek_v2", "deepseek2", kOfExperts, &kDeepseek2Trunk,
                  "DeepseekV2ForCausalLM"},
    WrittenFamily{"deepseek_v3", "deepseek2", kOfExperts, &kDeepseek2Trunk,
                  "DeepseekV3ForCausalLM"},
    WrittenFamily{"dots1", "dots1", kOfExperts, &kDots1Trunk, "Dots1ForCausalLM"},
    WrittenFamily{"ernie4_5_moe", "ernie4_5-moe", kOfExperts, &kErnie45MoeTrunk,
                  "Ernie4_5_MoeForCausalLM"},
    WrittenFamily{"exaone_moe", "exaone-moe"},
    WrittenFamily{"glm4_moe", "glm4moe", kOfExperts, &kGlm4MoeTrunk, "Glm4MoeForCausalLM"},
    WrittenFamily{"glm4_moe_lite", "deepseek2", kOfExperts, &kDeepseek2Trunk,
                  "Glm4MoeLiteForCausalLM"},
    WrittenFamily{"glm4v_moe", "glm4moe"},
    WrittenFamily{"glm_moe_dsa", "glm-dsa"},
    WrittenFamily{"gpt_oss", "gpt-oss", kOfExperts, &kGptOssTrunk, "GptOssForCausalLM"},
    WrittenFamily{"granitemoe", "granitemoe", kOfFeedForward, &kGraniteMoeTrunk,
                  "GraniteMoeForCausalLM", true},
    WrittenFamily{"granitemoehybrid", "granitehybrid", kOfFeedForward},
    WrittenFamily{"granitemoeshared", "granitemoe", kOfFeedForward, &kGraniteMoeTrunk,
                  "GraniteMoeSharedForCausalLM"},
    WrittenFamily{"hunyuan_v1_moe", "hunyuan-moe", kOfFeedForward, &kHunyuanMoeTrunk,
                  "HunYuanMoEV1ForCausalLM"},
    WrittenFamily{"hy_v3", "hy_v3"},
    WrittenFamily{"jamba", "jamba", kOfFeedForward},
    WrittenFamily{"kimi_k2", "deepseek2", kOfExperts, &kDeepseek2Trunk, "DeepseekV3ForCausalLM"},
    WrittenFamily{"kimi_linear", "kimi-linear"},
    WrittenFamily{"laguna", "laguna"},
    WrittenFamily{"lfm2_moe", "lfm2moe"},
    WrittenFamily{"llama4", "llama4"},
    WrittenFamily{"llama4_text", "llama4"},
    WrittenFamily{"mellum", "mellum"},
    WrittenFamily{"mimo_v2_flash", "mimo2"},
    WrittenFamily{"minimax_m2", "minimax-m2", kOfFeedForward, &kMinimaxM2Trunk,
                  "MiniMaxM2ForCausalLM"},
    WrittenFamily{"mistral4", "mistral4"},
    WrittenFamily{"mixtral", "llama", kOfFeedForward, &kMixtralTrunk, "MixtralForCausalLM"},
    WrittenFamily{"nemotron_h", "nemotron_h_moe"},
    WrittenFamily{"olmoe", "olmoe", kOfFeedForward, &kOlmoeTrunk, "OlmoeForCausalLM"},
    WrittenFamily{"phimoe", "phimoe", kOfFeedForward},
    WrittenFamily{"qwen2_moe", "qwen2moe", kOfExperts, &kQwen2MoeTrunk, "Qwen2MoeForCausalLM"},
    WrittenFamily{"qwen3_5_moe", "qwen35moe"},
    WrittenFamily{"qwen3_5_moe_text", "qwen35moe"},
    WrittenFamily{"qwen3_moe", "qwen3moe", kOfExperts, &kQwen3MoeTrunk, "Qwen3MoeForCausalLM"},
    WrittenFamily{"qwen3_next", "qwen3next"},
    WrittenFamily{"qwen3_vl_moe", "qwen3vlmoe"},
    WrittenFamily{"step3p5", "step35"},
};
static_assert(std::ranges::is_sorted(kWritten, {}, &WrittenFamily::model_type));

}  // namespace

std::span<const WrittenFamily> written_families() noexcept { return kWritten; }

const WrittenFamily* find_written_family(std::string_view model_type) noexcept {
  const auto* const at =
      std::ranges::lower_bound(kWritten, model_type, {}, &WrittenFamily::model_type);
  return at != kWritten.end() && at->model_type == model_type ? at : nullptr;
}

std::vector<std::string_view> written_model_types(std::string_view architecture) {
  std::vector<std::string_view> types;
  for (const WrittenFamily& family : kWritten) {
    if (family.architecture == architecture) types.push_back(family.model_type);
  }
  return types;
}

}  // namespace conclave::inline v0::checkpoint
