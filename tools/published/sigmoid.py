"""Families with the router of DeepSeek-V3, or one close to it."""

from published.fields import after, every, many_shared, noaux, oai, router, shared, typed
from published.row import LAYERS, Row, sizes
from published.source import says

GROUPS = {"n_group": 4, "topk_group": 3, "norm_topk_prob": False, "routed_scaling_factor": 1.25}
FIRST = {"first_k_dense_replace": 4}
KINDS = {"mlp_layer_types": ["dense", "sparse"] * (LAYERS // 2)}
THREE = {"n_shared_experts": 3}
ROUTED = sizes("n_routed_experts", intermediate_size=80)
KIMI = {"experts": "num_experts", "top_k": "num_experts_per_token"}


def plain(folder: str, layers, other: dict, types=(), wrapped=(), read_as=None) -> Row:
    """The block of DeepSeek-V3 under the usual names."""
    return Row(
        list(types) or [folder],
        read_as or folder,
        folder,
        ROUTED,
        {**GROUPS, **other},
        lambda c: {**noaux(c, folder), **(many_shared(c) if hasattr(c, "n_shared_experts") else {})},
        layers,
        list(wrapped),
    )


def kimi(folder: str) -> Row:
    groups = {"num_expert_group": 4, "topk_group": 3, "moe_renormalize": False, "routed_scaling_factor": 1.25}
    return Row(
        [folder],
        folder,
        folder,
        sizes("num_experts", "num_experts_per_token", intermediate_size=80),
        {**groups, **FIRST, "num_shared_experts": 3},
        lambda c: {**noaux(c, folder, **KIMI), **many_shared(c, "num_shared_experts")},
        typed,
    )


def bounded(c, folder: str) -> dict:
    says(folder, r"swiglu_limit")
    return {
        **noaux(c, folder),
        **many_shared(c),
        "activation.name": "silu_clamp_before",
        "activation.limit": c.swiglu_limit,
    }


def nemotron(c) -> dict:
    says("nemotron_h", r"intermediate_size=config\.moe_shared_expert_intermediate_size")
    return {
        **noaux(c, "nemotron_h"),
        **shared(c.moe_shared_expert_intermediate_size),
        "activation.name": c.mlp_hidden_act + "_no_mul",
        "latent.size": c.moe_latent_size or 0,
    }


def inkling(c) -> dict:
    says("inkling", r"F\.logsigmoid\(topk_logits\)")
    return {
        **router(c, "inkling", False, experts="n_routed_experts"),
        "router.name": "sink_softmax",
        "router.score": "sigmoid",
        "router.has_selection_bias": True,
        "router.scale": c.route_scale,
        "router.has_global_scale": says("inkling", r"self\.global_scale\.float\(\)"),
        **shared(c.moe_intermediate_size, "router_weight", **{"shared.count": c.n_shared_experts}),
    }


def inkling2(c) -> dict:
    return {
        **router(c, "inkling2", True, experts="n_routed_experts"),
        "router.score": c.scoring_func,
        "router.has_selection_bias": says("inkling2", r"scores \+ self\.e_score_correction_bias"),
        "router.scale": c.route_scale,
        "activation.name": "situ",
        "activation.beta": c.mlp_gate_softcap,
        "activation.linear_beta": c.mlp_up_softcap,
    }


def deepseek_v4(c) -> dict:
    """Of a layer that is not routed by a table."""
    says("deepseek_v4", r"scores = self\.score_fn\(logits\)")
    return {
        **router(c, "deepseek_v4", True, experts="n_routed_experts"),
        "router.score": c.scoring_func,
        "router.score_dtype": "model",
        "router.has_selection_bias": says("deepseek_v4", r"scores \+ self\.e_score_correction_bias"),
        "router.scale": c.routed_scaling_factor,
        "activation.name": "silu_clamp_before",
        "activation.limit": c.swiglu_limit,
        **shared(c.moe_intermediate_size),
    }


def hashed(c) -> dict:
    """Layers that are routed by a table choose nothing."""
    fields = {"router.name": "hash", "router.vocab_size": c.vocab_size, "router.has_selection_bias": False}
    return {str(i): fields for i, kind in enumerate(c.mlp_layer_types) if kind == "hash_moe"}


def afmoe(c) -> dict:
    says("afmoe", r"topk\(scores \+ expert_bias")
    return {
        **router(c, "afmoe", True),
        "router.score": "sigmoid",
        "router.has_selection_bias": True,
        "router.scale": c.route_scale,
        **many_shared(c, "num_shared_experts"),
    }


def lfm2(c) -> dict:
    says("lfm2_moe", r"routing_weights = router_logits\.sigmoid\(\)")
    return {
        **router(c, "lfm2_moe", c.norm_topk_prob),
        "router.score": "sigmoid",
        "router.score_dtype": "model",
        "router.has_selection_bias": c.use_expert_bias,
        "router.scale": c.routed_scaling_factor,
    }


def laguna(c) -> dict:
    return {
        **router(c, "laguna", True),
        "router.score": "sigmoid",
        "router.has_selection_bias": says("laguna", r"routing_scores \+ self\.e_score_correction_bias"),
        "router.soft_cap": c.moe_router_logit_softcapping,
        "output_scale": c.moe_routed_scaling_factor,
        **shared(c.shared_expert_intermediate_size),
    }


def hy_v3(c) -> dict:
    return {
        **router(c, "hy_v3", True),
        "router.score": "sigmoid",
        "router.has_selection_bias": says("hy_v3", r"routing_weights \+ e_score_correction_bias"),
        "router.scale": c.router_scaling_factor,
        **many_shared(c, "num_shared_experts"),
    }


def minimax(c, folder: str) -> dict:
    return {
        **router(c, folder, True, experts="num_local_experts", inner="intermediate_size"),
        "router.score": "sigmoid",
        "router.has_selection_bias": says(folder, r"routing_weights \+ (self\.)?e_score_correction_bias"),
    }


def minimax_m3(c) -> dict:
    return {
        **minimax(c, "minimax_m3_vl"),
        **oai(c, "minimax_m3_vl"),
        "output_scale": c.routed_scaling_factor,
        **shared(c.shared_intermediate_size),
    }


def step3p7(c) -> dict:
    says("step3p7", r"hidden_states \* self\.routed_scaling_factor")
    return {
        **router(c, "step3p7", True, experts="n_routed_experts"),
        "router.score": "sigmoid",
        "router.has_selection_bias": True,
        "output_scale": c.moe_router_scaling_factor,
        **shared(c.share_expert_dim),
        "shared.activation.name": "silu",
    }


def flint(c) -> dict:
    return {
        **router(c, "flint", c.norm_topk_prob),
        "router.score": "sigmoid",
        **shared(c.shared_expert_intermediate_size),
    }


def kolibri(c) -> dict:
    says("kolibri1", r"topk\(router_logits \+ self\.e_score_correction_bias")
    return {
        **router(c, "kolibri1", c.norm_topk_prob),
        "router.score": "sigmoid",
        "router.order": "topk_then_score",
        "router.has_selection_bias": True,
        **shared(c.shared_expert_intermediate_size),
    }


def rows() -> list[Row]:
    first = after("first_k_dense_replace")
    beam = {"router.scale": 1}
    v4 = sizes("n_routed_experts", vocab_size=100)
    minimax_sizes = sizes("num_local_experts", inner="intermediate_size")
    letters = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
    no_count = {k: v for k, v in ROUTED.items() if k != "num_hidden_layers"}
    return [
        plain("deepseek_v3", first, {**FIRST, **THREE}, ["deepseek_v3", "kimi_k2"], ["kimi_k25", "kimi_vl"]),
        plain("deepseek_v32", typed, {**FIRST, **THREE}),
        plain("axk1", typed, {**FIRST, **THREE}),
        plain("dots1", first, {**FIRST, **THREE, "norm_topk_prob": True}),
        plain("solar_open", every, THREE),
        plain("glm4_moe", first, {**FIRST, **THREE}),
        plain("glm4v_moe", first, {**FIRST, **THREE}, ["glm4v_moe_text"], ["glm4v_moe"], "glm4v_moe_text"),
        plain("glm4_moe_lite", typed, {**KINDS, **THREE}),
        plain("glm_moe_dsa", typed, {**FIRST, **THREE}),
        plain("mimo_v2_flash", typed, KINDS),
        kimi("kimi_linear"),
        kimi("bailing_hybrid"),
        Row(["axk2"], "axk2", "axk2", ROUTED, {**GROUPS, **FIRST, **THREE},
            lambda c: {**noaux(c, "axk2", mask="zero"), **many_shared(c)}, typed),
        Row(["exaone_moe"], "exaone_moe", "exaone_moe", sizes(intermediate_size=80),
            {**GROUPS, **FIRST, "num_shared_experts": 3},
            lambda c: {**noaux(c, "exaone_moe", experts="num_experts"), **many_shared(c, "num_shared_experts")}, typed),
        Row(["dots3_note_text"], "dots3_note_text", "dots3_note", ROUTED,
            {**GROUPS, **FIRST, **THREE, "shared_experts_intermediate_size": 40},
            lambda c: {**noaux(c, "dots3_note"), **shared(c.shared_experts_intermediate_size * c.n_shared_experts)},
            typed, ["dots3_note"]),
        Row(["beam"], "beam", "beam", sizes(intermediate_size=80), {**GROUPS, **KINDS},
            lambda c: {**noaux(c, "beam", experts="num_experts"), **beam, "output_scale": c.routed_scaling_factor},
            typed),
        Row(["glm5_next_text"], "glm5_next_text", "glm5_next", ROUTED,
            {**GROUPS, **KINDS, **THREE, "swiglu_limit": 6.5}, lambda c: bounded(c, "glm5_next"), typed, ["glm5_next"]),
        Row(["hy_v4"], "hy_v4", "hy_v4", ROUTED, {**GROUPS, **KINDS, **THREE, "swiglu_limit": 6.5},
            lambda c: {**bounded(c, "hy_v4"), "shared.activation.name": "silu"}, typed),
        Row(["nemotron_h", "nemotron_h_puzzle"], "nemotron_h", "nemotron_h", {**no_count, **letters},
            {**GROUPS, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 24, "mlp_hidden_act": "silu"},
            nemotron, lambda c: [1, 3]),
        Row(["inkling_text"], "inkling_text", "inkling", sizes("n_routed_experts"),
            {**KINDS, "n_shared_experts": 3, "route_scale": 2.5}, inkling, typed, ["inkling_mm_model"]),
        Row(["inkling2_text"], "inkling2_text", "inkling2", sizes("n_routed_experts"),
            {"route_scale": 2.5, "mlp_gate_softcap": 3.0, "mlp_up_softcap": 20.0, "scoring_func": "sqrtsoftplus"},
            inkling2, every, ["inkling2"]),
        Row(["deepseek_v4"], "deepseek_v4", "deepseek_v4", v4,
            {"mlp_layer_types": ["hash_moe", "moe"] * 4, "routed_scaling_factor": 2.5, "swiglu_limit": 6.5,
             "scoring_func": "sigmoid"}, deepseek_v4, every,
            special=hashed),
        Row(["afmoe"], "afmoe", "afmoe", sizes(), {"num_dense_layers": 3, "num_shared_experts": 1, "route_scale": 2.5},
            afmoe, after("num_dense_layers")),
        Row(["lfm2_moe"], "lfm2_moe", "lfm2_moe", sizes(),
            {"num_dense_layers": 3, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
            lfm2, after("num_dense_layers")),
        Row(["laguna"], "laguna", "laguna", sizes(),
            {**KINDS, "moe_router_logit_softcapping": 30.0, "moe_routed_scaling_factor": 2.5,
             "shared_expert_intermediate_size": 40}, laguna, typed),
        Row(["hy_v3", "hy_mt2"], "hy_v3", "hy_v3", sizes(),
            {**KINDS, "num_shared_experts": 3, "router_scaling_factor": 1.25}, hy_v3, typed),
        Row(["minimax_m2"], "minimax_m2", "minimax_m2", minimax_sizes, {}, lambda c: minimax(c, "minimax_m2"), every),
        Row(["minimax_m3_vl_text", "minimax_m3"], "minimax_m3_vl_text", "minimax_m3_vl", minimax_sizes,
            {**KINDS, "routed_scaling_factor": 1.5, "swiglu_limit": 6.0, "swiglu_alpha": 1.5,
             "shared_intermediate_size": 40}, minimax_m3, typed, ["minimax_m3_vl"]),
        Row(["step3p7_text"], "step3p5", "step3p7", sizes("moe_num_experts", "moe_top_k"),
            {"moe_router_scaling_factor": 2.5, "share_expert_dim": 40, **KINDS}, step3p7, typed, ["step3p7"]),
        Row(["flint"], "flint", "flint", sizes(),
            {"norm_topk_prob": False, "shared_expert_intermediate_size": 40, "mlp_only_layers": [3],
             "decoder_sparse_step": 2}, flint, by_step_of),
        Row(["kolibri1"], "kolibri1", "kolibri1", sizes(),
            {"norm_topk_prob": True, "shared_expert_intermediate_size": 40}, kolibri, every),
    ]


def by_step_of(c) -> list[int]:
    return [i for i in range(LAYERS) if i not in c.mlp_only_layers and (i + 1) % c.decoder_sparse_step == 0]
