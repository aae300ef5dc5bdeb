#include "checkpoint/gguf/family.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

using enum GgufGating;
using enum GgufActivation;

constexpr GgufRule kByKey = GgufRule::kKey;

// The router of DeepSeek-V3 and its kin: keys say all, with this function if there is none.
constexpr GgufFamily by_keys(std::string_view name, std::string_view model_type,
                             GgufGating gating) {
  return {.name = name,
          .model_type = model_type,
          .gating = gating,
          .gating_by = kByKey,
          .renormalize = kByKey,
          .scale = kByKey,
          .blocks = GgufBlocks::kBehindDense,
          .shared_by = kByKey};
}
constexpr GgufFamily with(GgufFamily family, GgufActivation activation) {
  family.activation = activation;
  return family;
}
constexpr GgufFamily with(GgufFamily family, GgufBlocks blocks) {
  family.blocks = blocks;
  return family;
}
constexpr GgufFamily always_biased(GgufFamily family) {
  family.selection_bias = GgufPresence::kAlways;
  return family;
}

constexpr std::array kFamilies = {
    always_biased(by_keys("afmoe", "afmoe", kSigmoid)),
    GgufFamily{.name = "arctic", .model_type = "arctic", .has_residual = true},
    by_keys("axk2", "axk2", kNone),
    GgufFamily{.name = "bailingmoe",
               .model_type = "bailing_moe",
               .renormalize = GgufRule::kKey,
               .scale = GgufRule::kKey,
               .shared_by = GgufRule::kKey},
    by_keys("bailingmoe2", "bailing_moe_v2", kNone),
    always_biased(by_keys("bailingmoe3", "bailing_hybrid", kNone)),
    GgufFamily{.name = "cohere2moe",
               .model_type = "cohere2_moe",
               .gating = kSigmoid,
               .gating_by = GgufRule::kKey,
               .renormalize = GgufRule::kKey,
               .scale = GgufRule::kKey,
               .blocks = GgufBlocks::kBehindDense,
               .shared = SharedMode::kAverage,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "dbrx", .model_type = "dbrx"},
    GgufFamily{.name = "deepseek",
               .model_type = "deepseek_v2",
               .renormalize = GgufRule::kNever,
               .scale = GgufRule::kKey,
               .blocks = GgufBlocks::kBehindDense,
               .shared_by = GgufRule::kKey},
    by_keys("deepseek2", "deepseek_v3", kSoftmax),
    by_keys("deepseek2-ocr", "deepseek_v2", kSoftmax),
    by_keys("deepseek32", "deepseek_v3", kNone),
    always_biased(
        with(with(by_keys("deepseek4", "deepseek_v4", kNone), kSiluClampBefore), GgufBlocks::kAll)),
    always_biased(
        with(with(by_keys("dflash", "deepseek_v4", kNone), kSiluClampBefore), GgufBlocks::kAll)),
    GgufFamily{.name = "diffusion-gemma",
               .model_type = "diffusion_gemma",
               .activation = kGeluTanh,
               .blocks = GgufBlocks::kByTensors,
               .shared = SharedMode::kNone,
               .scales_experts = true,
               .normalises_router = true},
    by_keys("dots1", "dots1", kNone),
    always_biased(by_keys("dots3note", "dots3_note_text", kNone)),
    GgufFamily{.name = "ernie4_5-moe",
               .model_type = "ernie4_5_moe",
               .blocks = GgufBlocks::kBehindDense,
               .shared_by = GgufRule::kKey},
    by_keys("exaone-moe", "exaone_moe", kNone),
    GgufFamily{.name = "gemma4",
               .model_type = "gemma4",
               .activation = kGeluTanh,
               .blocks = GgufBlocks::kByTensors,
               .shared = SharedMode::kNone,
               .scales_experts = true,
               .normalises_router = true},
    by_keys("glm-dsa", "glm_moe_dsa", kSigmoid),
    always_biased(by_keys("glm4moe", "glm4_moe", kSigmoid)),
    always_biased(with(by_keys("glm5-next", "glm5_next", kSigmoid), kSiluClampBefore)),
    GgufFamily{.name = "gpt-oss",
               .model_type = "gpt_oss",
               .gating = kSoftmaxOfChosen,
               .renormalize = GgufRule::kNever,
               .activation = kSwigluOai,
               .has_biases = true},
    GgufFamily{.name = "granite",
               .model_type = "granitemoe",
               .gate = GgufPresence::kOneForAll,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "granite_swa",
               .model_type = "granitemoe_swa",
               .gate = GgufPresence::kOneForAll,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "granitehybrid",
               .model_type = "granitemoehybrid",
               .gate = GgufPresence::kOneForAll,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "granitemoe",
               .model_type = "granitemoe",
               .gate = GgufPresence::kOneForAll,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "grok",
               .model_type = "grok1",
               .activation = kGeluTanh,
               .gate = GgufPresence::kOneForAll},
    GgufFamily{.name = "grovemoe",
               .model_type = "grovemoe",
               .refused = "its chunk experts read the sum of the routed ones"},
    GgufFamily{
        .name = "hunyuan-moe", .model_type = "hunyuan_v1_moe", .shared_by = GgufRule::kAlways},
    with(by_keys("hy_v3", "hy_v3", kSigmoid), GgufBlocks::kByTensors),
    with(by_keys("hy_v4", "hy_v4", kNone), kSiluClampBefore),
    GgufFamily{.name = "jamba",
               .model_type = "jamba",
               .renormalize = GgufRule::kNever,
               .blocks = GgufBlocks::kByTensors},
    always_biased(with(by_keys("kimi-k3", "kimi_k3", kNone), kSitu)),
    GgufFamily{.name = "kimi-linear",
               .model_type = "kimi_linear",
               .gating = kNone,
               .gating_by = GgufRule::kKey,
               .renormalize = GgufRule::kAlways,
               .scale = GgufRule::kKey,
               .blocks = GgufBlocks::kBehindDense,
               .selection_bias = GgufPresence::kAlways,
               .shared_by = GgufRule::kKey},
    by_keys("laguna", "laguna", kSigmoid),
    GgufFamily{.name = "lfm2moe",
               .model_type = "lfm2_moe",
               .gating = kNone,
               .gating_by = GgufRule::kKey,
               .renormalize = GgufRule::kAlways,
               .scale = GgufRule::kNever,
               .blocks = GgufBlocks::kBehindDense,
               .selection_bias = GgufPresence::kAlways},
    GgufFamily{.name = "llada-moe", .model_type = "olmoe", .renormalize = GgufRule::kNever},
    GgufFamily{.name = "llama", .model_type = "mixtral", .gate = GgufPresence::kOneForAll},
    GgufFamily{.name = "llama4",
               .model_type = "llama4",
               .gating = kSigmoid,
               .renormalize = GgufRule::kNever,
               .blocks = GgufBlocks::kByTensors,
               .shared_by = GgufRule::kAlways,
               .chooses_logits = true,
               .weight_on_input = true},
    GgufFamily{.name = "maple",
               .model_type = "mixtral",
               .activation = kSiluClampBefore,
               .clamp_otherwise = 7},
    GgufFamily{.name = "mellum", .model_type = "mellum"},
    GgufFamily{.name = "mimo2",
               .model_type = "mimo_v2_flash",
               .gating = kSigmoid,
               .blocks = GgufBlocks::kByTensors},
    GgufFamily{.name = "minicpm", .model_type = "mixtral", .gate = GgufPresence::kOneForAll},
    GgufFamily{.name = "minimax-01", .model_type = "minimax"},
    GgufFamily{.name = "minimax-m2",
               .model_type = "minimax_m2",
               .gating = kNone,
               .gating_by = GgufRule::kKey,
               .renormalize = GgufRule::kAlways,
               .scale = GgufRule::kNever,
               .selection_bias = GgufPresence::kAlways},
    always_biased(with(by_keys("minimax-m3", "minimax_m3_vl", kNone), kSwigluOai)),
    GgufFamily{.name = "mistral3", .model_type = "mixtral", .gate = GgufPresence::kOneForAll},
    by_keys("mistral4", "mistral4", kSoftmax),
    GgufFamily{.name = "nemotron_h_moe",
               .model_type = "nemotron_h",
               .gating = kSigmoid,
               .renormalize = GgufRule::kKey,
               .scale = GgufRule::kKey,
               .activation = kRelu2,
               .blocks = GgufBlocks::kByTensors,
               .gate = GgufPresence::kNever,
               .selection_bias = GgufPresence::kAlways,
               .shared_by = GgufRule::kKey},
    GgufFamily{.name = "nomic-bert-moe",
               .model_type = "mixtral",
               .renormalize = GgufRule::kNever,
               .activation = kGeluTanh,
               .blocks = GgufBlocks::kByTensors,
               .gate = GgufPresence::kNever},
    GgufFamily{.name = "olmoe", .model_type = "olmoe", .renormalize = GgufRule::kNever},
    GgufFamily{.name = "phimoe", .model_type = "mixtral"},
    GgufFamily{.name = "qwen2moe",
               .model_type = "qwen2_moe",
               .renormalize = GgufRule::kNever,
               .shared = SharedMode::kSigmoidGate,
               .shared_by = GgufRule::kAlways},
    GgufFamily{.name = "qwen35moe",
               .model_type = "qwen3_5_moe",
               .shared = SharedMode::kSigmoidGate,
               .shared_by = GgufRule::kAlways},
    GgufFamily{.name = "qwen3moe", .model_type = "qwen3_moe"},
    GgufFamily{.name = "qwen3next",
               .model_type = "qwen3_next",
               .shared = SharedMode::kSigmoidGate,
               .shared_by = GgufRule::kAlways},
    GgufFamily{.name = "qwen3vlmoe", .model_type = "qwen3_vl_moe"},
    GgufFamily{.name = "qwen4exp",
               .model_type = "qwen4_exp",
               .shared = SharedMode::kSigmoidGate,
               .shared_by = GgufRule::kAlways},
    GgufFamily{.name = "rnd1", .model_type = "qwen3_moe"},
    GgufFamily{.name = "smallthinker",
               .model_type = "smallthinker",
               .refused = "its experts multiply with relu(gate), and its router reads the input of "
                          "the whole layer"},
    with(by_keys("step35", "step3p5", kSigmoid), GgufBlocks::kByTensors),
};
static_assert(std::ranges::is_sorted(kFamilies, {}, &GgufFamily::name));

}  // namespace

std::span<const GgufFamily> gguf_families() noexcept { return kFamilies; }

const GgufFamily* find_gguf_family(std::string_view name) noexcept {
  const auto* at = std::ranges::lower_bound(kFamilies, name, {}, &GgufFamily::name);
  return at != kFamilies.end() && at->name == name ? at : nullptr;
}

}  // namespace conclave::inline v0::checkpoint
