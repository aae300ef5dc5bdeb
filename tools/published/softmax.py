"""Families whose scores are a softmax, over all experts or over the chosen ones."""

from published.fields import by_step, common, every, grouped, many_shared, oai, router, shared, typed
from published.row import EXPERTS, HIDDEN, INNER, LAYERS, Row, sizes
from published.source import epsilon, product, says

KINDS = {"mlp_layer_types": ["dense", "sparse"] * (LAYERS // 2)}
STEPS = {"mlp_only_layers": [3], "decoder_sparse_step": 2}
LOCAL = sizes("num_local_experts", inner="intermediate_size")
NAMES = {"experts": "num_local_experts", "inner": "intermediate_size"}
LONGCAT = {"experts": "n_routed_experts", "top_k": "moe_topk", "inner": "expert_ffn_hidden_size"}
WIDTH = {"shared_expert_intermediate_size": 40}


def after_topk(c, folder: str, **names) -> dict:
    return {**router(c, folder, False, **names), "router.order": "topk_then_score"}


def gated(c, folder: str, norm) -> dict:
    says(folder, r"F\.sigmoid\(self\.shared_expert_gate\(")
    return {**router(c, folder, norm), **shared(c.shared_expert_intermediate_size, "sigmoid_gate")}


def granite(c, folder: str) -> dict:
    return {**after_topk(c, folder, **NAMES), **shared(getattr(c, "shared_intermediate_size", 0))}


def gpt_oss(c) -> dict:
    says("gpt_oss", r"softmax\(router_top_value, dim=1, dtype=router_top_value\.dtype\)")
    return {
        **after_topk(c, "gpt_oss", **NAMES),
        **oai(c, "gpt_oss"),
        "router.score_dtype": "model",
        "router.has_logit_bias": True,
        "has_bias": True,
    }


def privacy_filter(c) -> dict:
    says("openai_privacy_filter", r"router_scores / self\.top_k")
    return {
        **after_topk(c, "openai_privacy_filter", **NAMES),
        **oai(c, "openai_privacy_filter"),
        "router.logits_dtype": "f32",
        "router.has_logit_bias": True,
        "router.scale": 1 / c.num_experts_per_tok,
        "output_scale": c.num_experts_per_tok,
        "has_bias": True,
    }


def llama4(c) -> dict:
    says("llama4", r"routed_in \* router_scores")
    return {
        **after_topk(c, "llama4", **NAMES),
        "router.score": "sigmoid",
        "weight_on": "input",
        **shared(c.intermediate_size),
    }


def deepseek_v2(c, folder: str) -> dict:
    says(folder, r"\.max\(dim=-1\)\.values")
    says(folder, r"masked_fill\(~score_mask\.bool\(\), 0\.0\)")
    by_group = c.topk_method == "group_limited_greedy"
    return {
        **router(c, folder, False, experts="n_routed_experts"),
        **(grouped(c) if by_group else {}),
        "router.group_score": "max",
        "router.group_mask": "zero",
        "router.scale": c.routed_scaling_factor,
        **many_shared(c),
    }


def mistral(c, folder: str, scores: str) -> dict:
    says(folder, r"masked_fill\(~score_mask\.bool\(\), 0\.0\)")
    return {
        **router(c, folder, getattr(c, "norm_topk_prob", True), experts="n_routed_experts"),
        **grouped(c),
        "router.group_mask": "zero",
        "router.scale": c.routed_scaling_factor,
        "router.score_dtype": scores,
        **many_shared(c),
    }


def dbrx(c) -> dict:
    says("dbrx", r"softmax\(router_logits, dim=1, dtype=router_logits\.dtype\)")
    says("dbrx", r"p=self\.moe_normalize_expert_weights")
    ffn = c.ffn_config
    return {
        "num_experts": ffn.moe_num_experts,
        "top_k": ffn.moe_top_k,
        "hidden_size": HIDDEN,
        "intermediate_size": ffn.ffn_hidden_size,
        "router.logits_dtype": product("dbrx"),
        "router.score_dtype": "model",
        "router.renormalize": "p_norm",
        "router.renormalize_p": ffn.moe_normalize_expert_weights,
        "activation.name": {"silu": "silu", "gelu": "gelu"}[ffn.ffn_act_fn["name"]],
    }


def aria(c) -> dict:
    says("aria", r"softmax\(top_k_logits, dim=-1\)")
    return {
        **after_topk(c, "aria", experts="moe_num_experts", top_k="moe_topk", inner="intermediate_size"),
        "router.score_dtype": "model",
        **shared(c.intermediate_size * c.moe_num_shared_experts, **{"shared.has_bias": c.mlp_bias}),
    }


def cohere2(c) -> dict:
    sigmoid = c.expert_selection_fn == "sigmoid"
    return {
        **router(c, "cohere2_moe", sigmoid and c.norm_topk_prob, inner="intermediate_size"),
        "router.order": "topk_then_score",
        "router.score": c.expert_selection_fn,
        "router.score_dtype": "model" if sigmoid else "f32",
        **shared(
            c.intermediate_size * c.num_shared_experts,
            "add" if c.shared_expert_combination_strategy == "sum" else "average",
        ),
    }


def gemma(c, folder: str) -> dict:
    says(folder, r"self\.scale \* self\.scalar_root_size")
    says(folder, r"self\.per_expert_scale\[")
    names = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
    return {
        **router(c, folder, True, top_k="top_k_experts"),
        "router.epsilon": epsilon(folder),
        "router.has_expert_scale": True,
        "router.input_norm.enabled": True,
        "router.input_norm.epsilon": c.rms_norm_eps,
        "activation.name": names[c.hidden_activation],
    }


def longcat(c) -> dict:
    says("longcat_flash", r"scores = router_logits\.softmax\(dim=-1\)")
    return {
        **router(c, "longcat_flash", False, **LONGCAT),
        "router.has_logit_bias": getattr(c, "router_bias", False),
        "router.has_selection_bias": True,
        "router.scale": c.routed_scaling_factor,
        "num_zero_experts": c.zero_expert_num,
    }


def ernie(c, folder: str) -> dict:
    says(folder, r"torch\.clamp\(\s*routing_weights\.sum\(dim=-1, keepdim=True\), min=self\.norm_min")
    inner = c.moe_intermediate_size
    inner = inner[0] if isinstance(inner, list) else inner
    return {
        **common(c, experts="moe_num_experts", top_k="moe_k"),
        "intermediate_size": inner,
        "router.logits_dtype": product(folder),
        "router.has_selection_bias": says(folder, r"self\.moe_statics\(routing_weights\)"),
        "router.renormalize": "sum",
        "router.epsilon": c.moe_norm_min,
        "router.epsilon_mode": "clamp_min",
        **shared(inner * c.moe_num_shared_experts, **{"shared.has_bias": c.use_bias}),
    }


def qwen() -> list[Row]:
    norm = {"norm_topk_prob": True}
    no_norm = {"norm_topk_prob": False}
    moe = sizes(intermediate_size=80)
    flag = lambda c, folder: router(c, folder, c.norm_topk_prob)  # noqa: E731
    return [
        Row(["qwen2_moe"], "qwen2_moe", "qwen2_moe", moe, {**STEPS, **norm, **WIDTH},
            lambda c: gated(c, "qwen2_moe", c.norm_topk_prob), by_step),
        Row(["qwen3_next"], "qwen3_next", "qwen3_next", moe, {**STEPS, **no_norm, **WIDTH},
            lambda c: gated(c, "qwen3_next", c.norm_topk_prob), by_step),
        Row(["qwen4_exp_text"], "qwen4_exp_text", "qwen4_exp", moe, {**no_norm, **WIDTH},
            lambda c: gated(c, "qwen4_exp", c.norm_topk_prob), every, ["qwen4_exp"]),
        Row(["qwen3_5_moe_text"], "qwen3_5_moe_text", "qwen3_5_moe", moe, WIDTH,
            lambda c: gated(c, "qwen3_5_moe", True), every, ["qwen3_5_moe"]),
        Row(["qwen3_moe"], "qwen3_moe", "qwen3_moe", moe, {**STEPS, **norm}, lambda c: flag(c, "qwen3_moe"), by_step),
        Row(["qwen3_omni_moe_text"], "qwen3_omni_moe_text", "qwen3_omni_moe", moe, {**STEPS, **no_norm},
            lambda c: flag(c, "qwen3_omni_moe"), by_step, ["qwen3_omni_moe_thinker", "qwen3_omni_moe"]),
        Row(["mellum"], "mellum", "mellum", moe, {**KINDS, **no_norm}, lambda c: flag(c, "mellum"), typed),
        Row(["qwen3_vl_moe_text"], "qwen3_vl_moe_text", "qwen3_vl_moe", moe, STEPS,
            lambda c: router(c, "qwen3_vl_moe", True), by_step, ["qwen3_vl_moe"]),
    ]


def in_groups() -> list[Row]:
    routed = sizes("n_routed_experts", intermediate_size=80)
    v2 = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3, "routed_scaling_factor": 1.25,
          "n_shared_experts": 3}
    first = lambda c: list(range(c.first_k_dense_replace, LAYERS))  # noqa: E731
    some = {"n_group": 4, "topk_group": 3, "routed_scaling_factor": 1.25, "n_shared_experts": 3,
            "first_k_dense_replace": 4}
    return [
        Row(["deepseek_v2", "deepseek_vl_v2"], "deepseek_v2", "deepseek_v2", routed, {**v2, "first_k_dense_replace": 4},
            lambda c: deepseek_v2(c, "deepseek_v2"), first, ["deepseek_vl2"]),
        Row(["deepseek_ocr2_text"], "deepseek_ocr2_text", "deepseek_ocr2",
            {**routed, "mlp_layer_types": ["sparse"] * LAYERS}, {**v2, **KINDS},
            lambda c: deepseek_v2(c, "deepseek_ocr2"), typed, ["deepseek_ocr2"]),
        Row(["unlimited_ocr_text"], "unlimited_ocr_text", "unlimited_ocr", routed, {**v2, "first_k_dense_replace": 4},
            lambda c: deepseek_v2(c, "unlimited_ocr"), typed, ["unlimited_ocr"]),
        Row(["mistral4"], "mistral4", "mistral4", routed, {**some, "norm_topk_prob": False},
            lambda c: mistral(c, "mistral4", "model"), first),
        Row(["mistral_large4_text"], "mistral_large4_text", "mistral_large4", routed, some,
            lambda c: mistral(c, "mistral_large4", "f32"), typed, ["mistral_large4"]),
    ]


def rows() -> list[Row]:
    granites = {"granitemoe": {}, "granitemoeshared": {"shared_intermediate_size": 40},
                "granitemoehybrid": {"shared_intermediate_size": 40},
                "granitemoe_swa": {"shared_intermediate_size": 40}}
    bounds = {"swiglu_limit": 6.0, "swiglu_alpha": 1.5}
    ffn = {"moe_num_experts": EXPERTS, "moe_top_k": 2, "ffn_hidden_size": INNER}
    dbrx_sizes = {"d_model": HIDDEN, "n_layers": LAYERS, "ffn_config": ffn}
    other_ffn = {"ffn_config": {**ffn, "moe_normalize_expert_weights": 2.0, "ffn_act_fn": {"name": "gelu"}}}
    ernie_sizes = sizes("moe_num_experts", "moe_k", intermediate_size=80)
    ernie_other = {"moe_norm_min": 1e-6, "moe_num_shared_experts": 1, "use_bias": True}
    vl = {**ernie_sizes, "moe_intermediate_size": [INNER, 16]}
    gemma_sizes = {**sizes(top_k="top_k_experts", intermediate_size=80)}
    gemma_other = {"hidden_activation": "silu", "rms_norm_eps": 1e-5}
    longcat_sizes = {"hidden_size": HIDDEN, "num_layers": LAYERS, "n_routed_experts": EXPERTS, "moe_topk": 2,
                     "expert_ffn_hidden_size": INNER}
    return qwen() + in_groups() + [
        *(Row([name], name, name, LOCAL, {}, lambda c, name=name: router(c, name, True, **NAMES), every)
          for name in ("mixtral", "minimax")),
        *(Row([name], name, name, sizes(inner="intermediate_size"), {"norm_topk_prob": True},
              lambda c, name=name: router(c, name, c.norm_topk_prob, inner="intermediate_size"), every)
          for name in ("olmoe", "flex_olmo")),
        Row(["jamba"], "jamba", "jamba", sizes(inner="intermediate_size"),
            {"expert_layer_period": 3, "expert_layer_offset": 2},
            lambda c: router(c, "jamba", False, inner="intermediate_size"),
            lambda c: [i for i in range(LAYERS) if i % c.expert_layer_period == c.expert_layer_offset]),
        *(Row([name], name, name, LOCAL, other, lambda c, name=name: granite(c, name), every)
          for name, other in granites.items()),
        Row(["gpt_oss"], "gpt_oss", "gpt_oss", LOCAL, bounds, gpt_oss, every),
        Row(["openai_privacy_filter"], "openai_privacy_filter", "openai_privacy_filter", LOCAL, bounds,
            privacy_filter, every),
        Row(["llama4_text"], "llama4_text", "llama4", {**LOCAL, "num_experts_per_tok": 1},
            {"interleave_moe_layer_step": 2}, llama4, lambda c: list(c.moe_layers), ["llama4"]),
        Row(["jetmoe"], "jetmoe", "jetmoe", LOCAL, {"activation_function": "gelu"},
            lambda c: {**after_topk(c, "jetmoe", **NAMES), "has_output_bias": True,
                       "activation.name": c.activation_function}, every),
        Row(["dbrx"], "dbrx", "dbrx", dbrx_sizes, other_ffn, dbrx, every),
        Row(["phimoe"], "phimoe", "phimoe", LOCAL, {"router_jitter_noise": 0.02},
            lambda c: {**router(c, "phimoe", False, **NAMES), "router.name": "sparse_mixer",
                       "router.jitter_epsilon": c.router_jitter_noise}, every),
        Row(["aria_text"], "aria_text", "aria", sizes("moe_num_experts", "moe_topk", "intermediate_size"),
            {"moe_num_shared_experts": 1, "mlp_bias": True}, aria, every, ["aria"]),
        Row(["cohere2_moe"], "cohere2_moe", "cohere2_moe", sizes(inner="intermediate_size"),
            {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 2,
             "shared_expert_combination_strategy": "sum", "first_k_dense_replace": 3}, cohere2, typed),
        Row(["cohere2_moe"], "cohere2_moe", "cohere2_moe",
            {**sizes(inner="intermediate_size"), "expert_selection_fn": "sigmoid", "num_shared_experts": 1},
            {}, cohere2, typed),
        Row(["gemma4_text"], "gemma4_text", "gemma4", {**gemma_sizes, "enable_moe_block": True}, gemma_other,
            lambda c: gemma(c, "gemma4"), every, ["gemma4"]),
        Row(["diffusion_gemma_text"], "diffusion_gemma_text", "diffusion_gemma", gemma_sizes, gemma_other,
            lambda c: gemma(c, "diffusion_gemma"), every, ["diffusion_gemma"]),
        Row(["longcat_flash"], "longcat_flash", "longcat_flash", longcat_sizes,
            {"zero_expert_num": 3, "routed_scaling_factor": 2.5, "router_bias": True}, longcat, every),
        Row(["hunyuan_v1_moe", "hunyuan"], "hunyuan_v1_moe", "hunyuan_v1_moe",
            sizes(top_k="moe_topk", inner="intermediate_size"), {},
            lambda c: {**router(c, "hunyuan_v1_moe", True, top_k="moe_topk", inner="intermediate_size"),
                       **shared(c.intermediate_size)}, every),
        Row(["ernie4_5_moe"], "ernie4_5_moe", "ernie4_5_moe", ernie_sizes,
            {**ernie_other, "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 6},
            lambda c: ernie(c, "ernie4_5_moe"),
            lambda c: [i for i in range(LAYERS) if (i + 1) % c.moe_layer_interval == 0
                       and c.moe_layer_start_index <= i <= c.moe_layer_end_index]),
        Row(["ernie4_5_vl_moe_text", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text_model"], "ernie4_5_vl_moe_text",
            "ernie4_5_vl_moe", vl, {**ernie_other, **KINDS}, lambda c: ernie(c, "ernie4_5_vl_moe"), typed,
            ["ernie4_5_vl_moe"], {"intermediate_size": vl["moe_intermediate_size"][1]}),
    ]


