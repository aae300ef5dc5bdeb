"""What transformers does not have, by hand from the file that is named: families with code beside their
checkpoints, and keys of released configurations that transformers' classes do not read. Of a row with no
optional keys of its own, `other` alone is the news."""

from published.row import EXPERTS, HIDDEN, INNER, LAYERS, Row, sizes

ALL = list(range(LAYERS))
HALF = [1, 3, 5, 7]
KINDS = ["dense", "sparse"] * (LAYERS // 2)
SIGMOID = {"router.score": "sigmoid", "router.has_selection_bias": True}


def base(**fields) -> dict:
    sizes_of = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER}
    names = {name.replace("__", "."): value for name, value in fields.items()}
    return {**sizes_of, **names}


def added(size: int) -> dict:
    return {"shared.mode": "add", "shared.intermediate_size": size}


def hand(types, source, config, stripped, other=None, changed=None, layers=ALL, other_layers=None, wrapped=()) -> Row:
    """`changed`: the fields of the layer that `other` changes from `stripped`."""
    is_other = lambda c: bool(other) and any(c.get(key) != config.get(key) for key in other)  # noqa: E731
    return Row(
        types,
        None,
        source,
        config,
        other or {},
        lambda c: {**stripped, **(changed or {})} if is_other(c) else stripped,
        lambda c: (other_layers or layers) if is_other(c) else layers,
        list(wrapped),
    )


ROUTED = sizes("n_routed_experts", intermediate_size=80)
LOCAL = sizes("num_local_experts", inner="intermediate_size")
V3 = base(
    **{"router.renormalize": "sum", "router.epsilon": 1e-20, "router.scale": 2.5, "router.num_groups": 8},
    **{"router.topk_groups": 4}, **SIGMOID, **added(INNER),
)
NOAUX = base(**{"router.renormalize": "sum", "router.epsilon": 1e-20}, **SIGMOID)
MODEL = {"router.logits_dtype": "model"}
STORED = {"router.logits_dtype": "stored"}
KIMI_SOURCE = "KimiLinearConfig of transformers; latent and situ: configuration_kimi.py of moonshotai/Kimi-K3"
NO_SUM = {"router.renormalize": "none", "router.epsilon": 0}


def without_transformers() -> list[Row]:
    klear = base(**MODEL, **SIGMOID, **{"shared.mode": "softmax_mix", "shared.intermediate_size": INNER})
    grok = base(**MODEL, **{"router.soft_cap": 30, "activation.name": "gelu"})
    phi = {"n_embd": HIDDEN, "n_layer": LAYERS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    phixtral = base(
        **MODEL,
        **{"router.order": "topk_then_score", "router.renormalize": "none", "has_bias": True},
        **{"activation.name": "gelu_tanh_no_mul", "intermediate_size": 4 * HIDDEN},
    )
    step = base(
        **STORED, **SIGMOID, **added(1280),
        **{"router.renormalize": "sum", "router.epsilon": 1e-20, "shared.activation.name": "silu"},
    )
    step_sizes = sizes("moe_num_experts", "moe_top_k")
    arctic = base(**MODEL)
    kimi = base(
        **{"router.renormalize": "sum", "router.epsilon": 1e-20, "router.scale": 2.446}, **SIGMOID, **added(INNER)
    )
    latent = {"latent.size": 24, "latent.has_norm": True, "latent.norm_epsilon": 1e-5}
    situ = {"activation.name": "situ", "activation.beta": 4, "activation.linear_beta": 25}
    bailing = base(**MODEL, **added(INNER), **{"router.renormalize": "sum", "router.epsilon": 1e-20})
    bailing_sizes = sizes(moe_shared_expert_intermediate_size=INNER)
    v2 = {**NOAUX, **added(INNER)}
    return [
        hand(["Klear", "klear"], "modeling_klear.py of Kwai-Klear/Klear-46B-A2.5B", sizes(), klear,
             {"norm_topk_prob": False, "n_shared_experts": 3, "mlp_only_layers": [3], "decoder_sparse_step": 2},
             {**NO_SUM, "shared.intermediate_size": 3 * INNER}, other_layers=[1, 5, 7]),
        hand(["grok-1", "grok_1"], "modeling_grok1.py of hpcai-tech/grok-1", sizes(inner="intermediate_size"), grok,
             {"router_logit_softcapping": 20.0, "hidden_act": "silu"},
             {"router.soft_cap": 20, "activation.name": "silu"}),
        hand(["phi-msft", "phixtral"], "modeling_phi.py of mlabonne/phixtral-4x2_8", phi, phixtral,
             {"n_inner": INNER, "activation_function": "gelu"},
             {"intermediate_size": INNER, "activation.name": "gelu_no_mul"}),
        hand(["step3p5", "step3p5_text"], "modeling_step3p5.py of stepfun-ai/Step-3.5-Flash", step_sizes, step,
             {"use_moe_router_bias": False, "norm_expert_weight": False, "moe_router_scaling_factor": 2.5,
              "share_expert_dim": 40, "moe_layers_enum": "1,3,5,7", "moe_router_activation": "softmax",
              "swiglu_limits": [7.0] * LAYERS, "swiglu_limits_shared": [16.0] * LAYERS},
             {**NO_SUM, "router.has_selection_bias": False, "router.scale": 2.5, "router.score": "softmax",
              "shared.intermediate_size": 40, "activation.name": "silu_clamp_after", "activation.limit": 7,
              "shared.activation.name": "silu_clamp_after", "shared.activation.limit": 16},
             layers=ALL[3:], other_layers=HALF),
        hand(["arctic"], "modeling_arctic.py of Snowflake/snowflake-arctic-base", LOCAL, arctic,
             {"moe_layer_frequency": 4, "use_residual": True}, {"residual.intermediate_size": HIDDEN},
             layers=HALF, other_layers=[3, 7]),
        hand(["arctic"], "modeling_arctic.py of Snowflake/snowflake-arctic-base", {**LOCAL, "num_experts_per_tok": 1},
             {**arctic, "top_k": 1, "router.renormalize": "none"}, layers=HALF),
        hand(["minimax_text_01", "minimax_m1"], "modeling_minimax_m1.py of MiniMaxAI/MiniMax-M1-80k", LOCAL,
             base(**MODEL)),
        hand(["kimi_linear", "kimi_k3_text"], KIMI_SOURCE,
             sizes("num_experts", "num_experts_per_token"), kimi,
             {"routed_expert_hidden_size": 24, "latent_moe_use_norm": True, "rms_norm_eps": 1e-5, "hidden_act": "situ",
              "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "moe_layer_freq": 2,
              "moe_router_activation_func": "softmax"}, {**latent, **situ, "router.score": "softmax"},
             layers=ALL[1:], other_layers=[2, 4, 6], wrapped=["kimi_k3"]),
        hand(["kimi_linear"], KIMI_SOURCE,
             {**sizes("num_experts", "num_experts_per_token"), "hidden_act": "situ"},
             {**kimi, **situ, "activation.beta": 1, "activation.linear_beta": 0}, layers=ALL[1:]),
        hand(["kimi_linear"], KIMI_SOURCE,
             {**sizes("num_experts", "num_experts_per_token"), "routed_expert_hidden_size": 24,
              "latent_moe_use_norm": True},
             {**kimi, "latent.size": 24, "latent.has_norm": True, "latent.norm_epsilon": 1e-6}, layers=ALL[1:]),
        hand(["bailing_moe", "bailing_moe_linear"], "modeling_bailing_moe.py of inclusionAI/Ling-lite", bailing_sizes,
             bailing,
             {"norm_topk_prob": False, "num_shared_experts": 2, "moe_router_enable_expert_bias": True,
              "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
             {**NO_SUM, "shared.intermediate_size": 2 * INNER, "router.has_selection_bias": True, "router.scale": 2.5},
             other_layers=ALL[2:]),
        hand(["bailing_moe_v2", "bailing_moe_linear_v2"], "modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0",
             bailing_sizes, v2,
             {"norm_topk_prob": False, "num_shared_experts": 2, "moe_router_enable_expert_bias": False, "n_group": 4,
              "topk_group": 3, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "score_function": "softmax",
              "moe_shared_expert_intermediate_size": 40},
             {**NO_SUM, "shared.intermediate_size": 80, "router.has_selection_bias": False, "router.scale": 2.5,
              "router.num_groups": 4, "router.topk_groups": 3, "router.score": "softmax"}, other_layers=ALL[2:]),
    ]


def keys_of_releases() -> list[Row]:
    """Keys that transformers' classes do not read, as the code beside the released checkpoints does."""
    afmoe = base(**MODEL, **SIGMOID, **added(2 * INNER), **{"router.epsilon": 1e-20})
    zero = {"num_zero_experts": 256, "router.has_selection_bias": True, "router.scale": 6}
    longcat = {"hidden_size": HIDDEN, "num_layers": LAYERS, "n_routed_experts": EXPERTS, "moe_topk": 2,
               "expert_ffn_hidden_size": INNER}
    hunyuan = sizes(top_k="moe_topk", inner="intermediate_size")
    v4 = base(**MODEL, **added(INNER), **{
        "router.score": "sqrtsoftplus", "router.score_dtype": "model", "router.has_selection_bias": True,
        "router.epsilon": 1e-20, "router.scale": 1.5, "activation.name": "silu_clamp_before", "activation.limit": 10})
    inkling = base(**SIGMOID, **{
        "router.name": "sink_softmax", "router.renormalize": "none", "router.scale": 8, "router.has_global_scale": True,
        "shared.mode": "router_weight", "shared.intermediate_size": INNER, "shared.count": 2})
    ernie = base(**added(2 * INNER), **{
        "router.has_selection_bias": True, "router.epsilon": 1e-12, "router.epsilon_mode": "clamp_min"})
    return [
        hand(["afmoe"], "modeling_afmoe.py of arcee-ai/Trinity-Mini", sizes(), afmoe,
             {"route_norm": False, "score_func": "softmax"}, {**NO_SUM, "router.score": "softmax"}, layers=ALL[1:]),
        hand(["longcat_flash"], "modeling_longcat_flash.py of meituan-longcat/LongCat-Flash-Chat", longcat,
             base(**zero, **NO_SUM), {"norm_topk_prob": True}, {"router.renormalize": "sum", "router.epsilon": 1e-20}),
        hand(["minimax_m2"], "modeling_minimax_m2.py of MiniMaxAI/MiniMax-M2", LOCAL, base(**STORED, **SIGMOID),
             {"use_routing_bias": False, "scoring_func": "softmax"},
             {"router.has_selection_bias": False, "router.score": "softmax"}),
        hand(["hy_v3"], "modeling_hy_v3.py of tencent/Hy3", sizes(), {**NOAUX, **added(INNER), "router.scale": 2.826},
             {"route_norm": False, "mlp_bias": True, "first_k_dense_replace": 3}, {**NO_SUM, "shared.has_bias": True},
             layers=ALL[1:], other_layers=ALL[3:]),
        hand(["hunyuan_v1_moe"], "modeling_hunyuan.py of tencent/Hunyuan-A13B-Instruct", hunyuan,
             base(**STORED, **added(INNER)),
             {"moe_intermediate_size": 40, "num_shared_expert": 2, "moe_layer_num_skipped": 2},
             {"intermediate_size": 40, "shared.intermediate_size": 2 * INNER}, other_layers=ALL[2:]),
        hand(["hunyuan_v1_moe"], "modeling_hunyuan.py of tencent/Hunyuan-A13B-Instruct",
             {**hunyuan, "use_mixed_mlp_moe": False}, base(**STORED)),
        hand(["deepseek_v3"], "modeling_deepseek.py of deepseek-ai/DeepSeek-V3", ROUTED, V3,
             {"moe_layer_freq": 2, "scoring_func": "softmax", "topk_method": "noaux_tc"}, {"router.score": "softmax"},
             layers=ALL[3:], other_layers=[4, 6]),
        hand(["deepseek_v4"], "inference/model.py of deepseek-ai/DeepSeek-V4",
             {**sizes("n_routed_experts"), "vocab_size": 100, "num_hash_layers": 0}, v4),
        hand(["inkling_text"], "config.json of the released Inkling checkpoints", sizes("n_routed_experts"), inkling,
             {"dense_mlp_idx": 2, "dense_intermediate_size": 80, "intermediate_size": 40},
             {"intermediate_size": 40, "shared.intermediate_size": 40}, other_layers=ALL[2:]),
        hand(["dots3_note_text"], "config.json of the released dots.note checkpoints", ROUTED, {**NOAUX, **added(1536)},
             {"moe_shared_expert_intermediate_size": 40, "moe_layer_freq": 2}, added(40), layers=ALL[1:],
             other_layers=[2, 4, 6]),
        hand(["ernie4_5_moe"], "modeling_ernie4_5_moe.py of baidu/ERNIE-4.5-21B-A3B-PT",
             {**sizes("moe_num_experts", "moe_k"), "moe_layer_end_index": -1}, ernie, {"moe_use_aux_free": False},
             {"router.has_selection_bias": False}, layers=ALL[1:]),
        hand(["nemotron_h"], "modeling_nemotron_h.py of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
             sizes("n_routed_experts", hybrid_override_pattern="MEM*-EME"),
             {**NOAUX, **added(7688), "activation.name": "relu2_no_mul"}, {"mlp_bias": True}, {"shared.has_bias": True},
             layers=[1, 5, 7], wrapped=["nemo_speechlm", "NemotronH_Omni_Reasoning_V3"]),
        hand(["step3p7_text"], "modeling_step3p7.py of transformers", sizes("moe_num_experts", "moe_top_k"),
             base(**STORED, **SIGMOID, **added(1280), **{"shared.activation.name": "silu"}),
             {"swiglu_limits": [7.0] * LAYERS, "swiglu_limits_shared": [16.0] * LAYERS, "mlp_layer_types": KINDS},
             {"activation.name": "silu_clamp_after", "activation.limit": 7,
              "shared.activation.name": "silu_clamp_after", "shared.activation.limit": 16},
             layers=ALL[3:], other_layers=HALF),
    ]


def rows() -> list[Row]:
    return without_transformers() + keys_of_releases()
