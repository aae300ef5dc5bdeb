// Names are those of gguf-py's tensor map, keys those of llama.cpp's graphs.
#include "checkpoint/gguf/trunk/trunk_table.h"

namespace conclave::inline v0::checkpoint {
namespace {

using enum NamedOrder;
using enum KeyKind;
using enum KeyUse;

constexpr std::string_view kModelLayers = "model.layers.";

constexpr std::array kOnce = {
    NamedTensor{"token_embd", "model.embed_tokens"},
    NamedTensor{"output_norm", "model.norm"},
    NamedTensor{"output", "lm_head"},
};

constexpr std::array kAttention = {
    NamedTensor{"attn_norm", "input_layernorm"},    NamedTensor{"attn_q", "self_attn.q_proj"},
    NamedTensor{"attn_k", "self_attn.k_proj"},      NamedTensor{"attn_v", "self_attn.v_proj"},
    NamedTensor{"attn_output", "self_attn.o_proj"},
};
constexpr std::array kPairedAttention = {
    NamedTensor{"attn_norm", "input_layernorm"},
    NamedTensor{"attn_q", "self_attn.q_proj", kQueryPairs},
    NamedTensor{"attn_k", "self_attn.k_proj", kKeyPairs},
    NamedTensor{"attn_v", "self_attn.v_proj"},
    NamedTensor{"attn_output", "self_attn.o_proj"},
};
// Files have the two parts of kv_b_proj; older ones have it whole.
constexpr std::array kLatentAttention = {
    NamedTensor{"attn_norm", "input_layernorm"},
    NamedTensor{"attn_q", "self_attn.q_proj"},
    NamedTensor{"attn_q_a", "self_attn.q_a_proj"},
    NamedTensor{"attn_q_a_norm", "self_attn.q_a_layernorm"},
    NamedTensor{"attn_q_b", "self_attn.q_b_proj"},
    NamedTensor{"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    NamedTensor{"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    NamedTensor{"attn_k_b", "self_attn.kv_b_proj", kLatentKeys},
    NamedTensor{"attn_v_b", "self_attn.kv_b_proj", kLatentValues},
    NamedTensor{"attn_kv_b", "self_attn.kv_b_proj"},
    NamedTensor{"attn_output", "self_attn.o_proj"},
};
constexpr std::array kHeadNorms = {
    NamedTensor{"attn_q_norm", "self_attn.q_norm"},
    NamedTensor{"attn_k_norm", "self_attn.k_norm"},
};
constexpr std::array kLayerHeadNorms = {
    NamedTensor{"attn_q_norm", "self_attn.query_layernorm"},
    NamedTensor{"attn_k_norm", "self_attn.key_layernorm"},
};
constexpr std::array kSinks = {
    NamedTensor{"attn_sinks", "self_attn.sinks", kSame, true},
};
constexpr std::array kFfnNorm = {
    NamedTensor{"ffn_norm", "post_attention_layernorm"},
};
constexpr std::array kPostAttentionNorm = {
    NamedTensor{"post_attention_norm", "post_attention_layernorm"},
};
constexpr std::array kDense = {
    NamedTensor{"ffn_gate", "mlp.gate_proj"},
    NamedTensor{"ffn_up", "mlp.up_proj"},
    NamedTensor{"ffn_down", "mlp.down_proj"},
};

constexpr std::array kSizes = {
    NamedKey{"context_length", "max_position_embeddings"},
    NamedKey{"embedding_length", "hidden_size"},
    NamedKey{"feed_forward_length", "intermediate_size"},
    NamedKey{"vocab_size", "vocab_size"},
    NamedKey{"attention.head_count", "num_attention_heads"},
    NamedKey{"attention.layer_norm_rms_epsilon", "rms_norm_eps", kNumber},
    NamedKey{.file = "tokenizer.ggml.bos_token_id", .config = "bos_token_id", .is_optional = true},
    NamedKey{.file = "tokenizer.ggml.eos_token_id", .config = "eos_token_id", .is_optional = true},
    NamedKey{
        .file = "tokenizer.ggml.padding_token_id", .config = "pad_token_id", .is_optional = true},
};
constexpr std::array kGroupedHeads = {
    NamedKey{.file = "attention.head_count_kv",
             .config = "num_key_value_heads",
             .instead = "num_attention_heads"},
};
// Files of latent attention state the sizes of one head of keys and values, which all heads share,
// and apart from them those that directories have. Older files have the latter alone.
constexpr std::array kLatentSizes = {
    NamedKey{.file = "attention.head_count_kv", .config = "", .use = kFile, .otherwise = 1},
    NamedKey{.file = "attention.head_count", .config = "num_key_value_heads", .use = kDirectory},
    NamedKey{"attention.kv_lora_rank", "kv_lora_rank"},
    NamedKey{.file = "attention.q_lora_rank", .config = "q_lora_rank", .is_optional = true},
    NamedKey{"rope.dimension_count", "qk_rope_head_dim"},
    NamedKey{.file = "attention.key_length",
             .config = "kv_lora_rank",
             .use = kFile,
             .plus = "qk_rope_head_dim"},
    NamedKey{.file = "attention.value_length", .config = "kv_lora_rank", .use = kFile},
    NamedKey{.file = "attention.key_length_mla",
             .config = "qk_nope_head_dim",
             .plus = "qk_rope_head_dim",
             .instead = "attention.key_length"},
    NamedKey{.file = "attention.value_length_mla",
             .config = "v_head_dim",
             .instead = "attention.value_length"},
};
constexpr std::array kWindow = {
    NamedKey{"attention.sliding_window", "sliding_window"},
};
constexpr std::array kFactors = {
    NamedKey{.file = "attention.scale",
             .config = "attention_multiplier",
             .kind = kNumber,
             .otherwise = 1},
    NamedKey{.file = "embedding_scale",
             .config = "embedding_multiplier",
             .kind = kNumber,
             .otherwise = 1},
    NamedKey{
        .file = "residual_scale", .config = "residual_multiplier", .kind = kNumber, .otherwise = 1},
    NamedKey{.file = "logit_scale", .config = "logits_scaling", .kind = kNumber, .otherwise = 1},
};
constexpr std::array kExpertWidth = {
    NamedKey{.file = "expert_feed_forward_length", .config = "intermediate_size", .use = kFile},
};
constexpr std::array kInterleave = {
    NamedKey{.file = "interleave_moe_layer_step",
             .config = "moe_layer_interval",
             .use = kFile,
             .otherwise = 1},
};

constexpr std::array kDbrxOnce = {
    NamedTensor{"token_embd", "transformer.wte"},
    NamedTensor{"output_norm", "transformer.norm_f"},
    NamedTensor{"output", "lm_head"},
};
constexpr std::array kDbrxAttention = {
    NamedTensor{"attn_norm", "norm_attn_norm.norm_1"},
    NamedTensor{"attn_output_norm", "norm_attn_norm.norm_2"},
    NamedTensor{"attn_qkv", "norm_attn_norm.attn.Wqkv"},
    NamedTensor{"attn_output", "norm_attn_norm.attn.out_proj"},
};
// The norms of its class have this guard, which config.json does not state.
constexpr std::array kDbrxSizes = {
    NamedKey{"context_length", "max_seq_len"},
    NamedKey{"embedding_length", "d_model"},
    NamedKey{"vocab_size", "vocab_size"},
    NamedKey{"attention.head_count", "n_heads"},
    NamedKey{"attention.head_count_kv", "attn_config.kv_n_heads"},
    NamedKey{"attention.clamp_kqv", "attn_config.clip_qkv", kNumber},
    NamedKey{.file = "attention.layer_norm_epsilon",
             .config = "",
             .kind = kNumber,
             .use = kFile,
             .otherwise = 1e-5},
};

constexpr std::array kNoWindow = {FixedKey{"sliding_window"}};
constexpr std::array kNoUsedWindow = {FixedKey{"use_sliding_window"}};
constexpr std::array kNoBias = {FixedKey{"attention_bias"}};
constexpr std::array kNoUsedBias = {FixedKey{"use_bias"}};
constexpr std::array kOlmoeFixed = {FixedKey{"clip_qkv"}, FixedKey{"attention_bias"}};

constexpr std::array kBias = {PresenceKey{"attention_bias", "attn_q.bias"}};
constexpr std::array kQkvBias = {PresenceKey{"qkv_bias", "attn_q.bias"}};
constexpr std::array kGlm4Flags = {PresenceKey{"attention_bias", "attn_q.bias"},
                                   PresenceKey{"use_qk_norm", "attn_q_norm.weight"}};

}  // namespace

constexpr TrunkTable kMixtralTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kPairedAttention, kFfnNorm},
    .keys = {kSizes, kGroupedHeads},
    .fixed = kNoWindow,
    .rope = {.width = RopeWidth::kHead},
};

constexpr TrunkTable kQwen2MoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kFfnNorm},
    .keys = {kSizes, kGroupedHeads},
    .fixed = kNoUsedWindow,
    .flags = kQkvBias,
    .has_head_dim = false,
};

constexpr TrunkTable kQwen3MoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kHeadNorms, kFfnNorm},
    .keys = {kSizes, kGroupedHeads},
    .fixed = kNoUsedWindow,
    .flags = kBias,
};

constexpr TrunkTable kOlmoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kHeadNorms, kFfnNorm},
    .keys = {kSizes, kGroupedHeads},
    .fixed = kOlmoeFixed,
    .has_head_dim = false,
    .has_grouped_heads = false,
};

constexpr TrunkTable kDeepseek2Trunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kLatentAttention, kFfnNorm, kDense},
    .keys = {kSizes, kLatentSizes},
    .fixed = kNoBias,
    .has_head_dim = false,
    .says_head_size = false,
    .rope = {.has_log_multiplier = true},
};

constexpr TrunkTable kGptOssTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kSinks, kPostAttentionNorm},
    .keys = {kSizes, kGroupedHeads, kWindow},
    .flags = kBias,
    .alternates_windows = true,
    .rope = {.truncates = false},
};

constexpr TrunkTable kGraniteMoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kPairedAttention, kFfnNorm},
    .keys = {kSizes, kGroupedHeads, kFactors},
    .fixed = kNoBias,
    .has_head_dim = false,
    .rope = {.width = RopeWidth::kHead},
};

constexpr TrunkTable kGlm4MoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kHeadNorms, kPostAttentionNorm, kDense},
    .keys = {kSizes, kGroupedHeads},
    .flags = kGlm4Flags,
    .rope = {.width = RopeWidth::kPartial, .partial_otherwise = 0.5},
};

constexpr TrunkTable kHunyuanMoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kLayerHeadNorms, kFfnNorm},
    .keys = {kSizes, kGroupedHeads, kExpertWidth},
    .fixed = kNoBias,
    .rope = {.has_alpha = true},
};

constexpr TrunkTable kErnie45MoeTrunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kFfnNorm, kDense},
    .keys = {kSizes, kGroupedHeads, kInterleave},
    .fixed = kNoUsedBias,
};

constexpr TrunkTable kMinimaxM2Trunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kHeadNorms, kFfnNorm},
    .keys = {kSizes, kGroupedHeads, kExpertWidth},
    .rope = {.width = RopeWidth::kPartial},
};

constexpr TrunkTable kDots1Trunk = {
    .layers = kModelLayers,
    .once = kOnce,
    .layer = {kAttention, kHeadNorms, kFfnNorm, kDense},
    .keys = {kSizes, kGroupedHeads},
    .fixed = kNoBias,
    .has_grouped_heads = false,
};

constexpr TrunkTable kDbrxTrunk = {
    .layers = "transformer.blocks.",
    .once = kDbrxOnce,
    .layer = {kDbrxAttention},
    .keys = {kDbrxSizes},
    .has_head_dim = false,
    .comes_back = false,
    .rope = {.base = "attn_config.rope_theta"},
};

}  // namespace conclave::inline v0::checkpoint
