#include "conclave/synthetic.h"

#include <array>

namespace conclave::inline v0 {
namespace {

// Sizes from the published config.json of each model.
MoeSpec make_spec(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate,
                  Renormalize renormalize) {
  MoeSpec spec;
  spec.num_experts = experts;
  spec.top_k = top_k;
  spec.hidden_size = hidden;
  spec.intermediate_size = intermediate;
  spec.weight_dtype = DType::kBF16;
  spec.router.renormalize = renormalize;
  spec.router.logits_dtype = DType::kBF16;
  return spec;
}

MoeSpec qwen2_moe() {
  MoeSpec spec = make_spec(60, 4, 2048, 1408, Renormalize::kNone);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 5632};
  return spec;
}

}  // namespace

std::span<const ModelPreset> model_presets() {
  static const std::array kPresets = {
      ModelPreset{"mixtral-8x7b", "mixtral", 32, make_spec(8, 2, 4096, 14336, Renormalize::kSum),
                  "Mixtral-8x7B"},
      ModelPreset{"qwen3-30b-a3b", "qwen3_moe", 48, make_spec(128, 8, 2048, 768, Renormalize::kSum),
                  "Qwen3-30B-A3B"},
      ModelPreset{"qwen3-235b-a22b", "qwen3_moe", 94,
                  make_spec(128, 8, 4096, 1536, Renormalize::kSum), "Qwen3-235B-A22B"},
      ModelPreset{"qwen1.5-moe-a2.7b", "qwen2_moe", 24, qwen2_moe(),
                  "Qwen1.5-MoE-A2.7B, with a sigmoid-gated shared expert"},
      ModelPreset{"olmoe", "olmoe", 16, make_spec(64, 8, 2048, 1024, Renormalize::kNone),
                  "OLMoE-1B-7B"},
      // Each token chooses 8 of 256 experts over 8 ranks: on average one choice per token on each
      // rank.
      ModelPreset{"dsv3-ep-shard", "qwen3_moe", 1, make_spec(32, 1, 7168, 2048, Renormalize::kSum),
                  "the 32 experts that one of 8 expert-parallel ranks holds of DeepSeek-V3"},
  };
  return kPresets;
}

const ModelPreset* find_preset(std::string_view name) noexcept {
  for (const ModelPreset& preset : model_presets()) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

}  // namespace conclave::inline v0
