"""Fields of the library's MoeSpec from attributes of transformers' configurations."""

from published.row import HIDDEN, LAYERS
from published.source import epsilon, product, says


def every(config) -> list[int]:
    return list(range(LAYERS))


def after(attribute: str):
    return lambda c: list(range(getattr(c, attribute), LAYERS))


def typed(config) -> list[int]:
    return [i for i, kind in enumerate(config.mlp_layer_types) if kind != "dense"]


def by_step(config) -> list[int]:
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return [i for i in range(LAYERS) if i not in dense and (i + 1) % step == 0]


def common(c, experts="num_experts", top_k="num_experts_per_tok", inner="moe_intermediate_size") -> dict:
    return {
        "num_experts": getattr(c, experts),
        "top_k": getattr(c, top_k),
        "hidden_size": HIDDEN,
        "intermediate_size": getattr(c, inner),
    }


def normed(on: bool, folder: str) -> dict:
    return {"router.renormalize": "sum", "router.epsilon": epsilon(folder)} if on else {"router.renormalize": "none"}


def shared(size, mode="add", **more) -> dict:
    return {"shared.mode": mode, "shared.intermediate_size": size, **more} if size else {}


def router(c, folder: str, norm, **names) -> dict:
    """What every router has: its product, and whether its weights are renormalised."""
    return {**common(c, **names), "router.logits_dtype": product(folder), **normed(norm, folder)}


def grouped(c) -> dict:
    groups = c.n_group or 1
    return {"router.num_groups": groups, **({"router.topk_groups": c.topk_group} if groups > 1 else {})}


def noaux(c, folder: str, norm=None, mask="inf", **names) -> dict:
    """The router of DeepSeek-V3, by the family's own modeling file."""
    says(folder, r"e_score_correction_bias")
    says(folder, r"\.sigmoid\(\)")
    says(folder, r"masked_fill\(~score_mask\.bool\(\), " + (r"float\(.-inf.\)" if mask == "inf" else r"0\.0") + r"\)")
    return {
        **router(c, folder, c.norm_topk_prob if norm is None else norm, **{"experts": "n_routed_experts", **names}),
        **grouped(c),
        "router.group_mask": mask,
        "router.score": "sigmoid",
        "router.has_selection_bias": True,
        "router.scale": c.routed_scaling_factor,
    }


def many_shared(c, attribute="n_shared_experts") -> dict:
    return shared(c.moe_intermediate_size * (getattr(c, attribute) or 0))


def oai(c, folder: str) -> dict:
    """The bounded activation of gpt-oss."""
    alpha = getattr(c, "swiglu_alpha", None)
    return {
        "activation.name": "swiglu_oai",
        "activation.limit": c.swiglu_limit,
        "activation.alpha": 1.702 if alpha is None else alpha,
        "activation.beta": 1,
    }
