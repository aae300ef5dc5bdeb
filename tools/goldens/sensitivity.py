"""Whether a golden would notice a forgotten part: every part of a block is dropped in turn.

A golden that survives without its selection bias, its limit or its shared expert tests none of them.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from goldens.oracle import Block, Mlp, Router, identity, swiglu

VISIBLE = 3e-2  # relative change of some token, five times the tolerance of a bfloat16 run


def invisible(block: Block, run) -> list[str]:
    """Names of parts whose loss changes neither ids nor weights nor output. run: a build.Run."""
    exact = results(block, run)
    return [name for name, changed in without_parts(block) if not differs(exact, results(changed, run))]


def results(block: Block, run) -> list[np.ndarray]:
    x = run.x.double().numpy()
    side = {key: value.double().numpy() for key, value in run.extra.items()}
    weights = block.router.weigh(run.logits, run.ids)
    return [
        block.router.select(run.logits, run.token_ids),
        block.logits(side.get("router_input", x)),
        weights,
        block.output(x, run.ids, weights, run.logits, side),
    ]


def differs(exact: list[np.ndarray], changed: list[np.ndarray]) -> bool:
    ids, other = exact[0], changed[0]
    if not np.array_equal(ids, other):
        return True
    for old, new in zip(exact[1:], changed[1:], strict=True):
        if np.any(np.linalg.norm(new - old, axis=1) > VISIBLE * np.linalg.norm(old, axis=1)):
            return True
    return False


def without_parts(block: Block) -> Iterator[tuple[str, Block]]:
    router = block.router
    for name, changed in without_router_parts(router):
        yield name, dataclasses.replace(block, router=changed)
    neutral = {
        "router_bias": 0.0, "router_norm": identity, "weight_on_input": False, "output_scale": 1.0,
        "output_bias": 0.0,
    }
    for name, value in neutral.items():
        if is_set(getattr(block, name), value):
            yield name, dataclasses.replace(block, **{name: value})
    if block.shared is not None:
        yield "the shared expert", dataclasses.replace(block, shared=np.zeros_like)
    for name, change in mlp_changes(block.experts[0]):
        yield f"experts' {name}", dataclasses.replace(
            block, experts=[dataclasses.replace(expert, **change) for expert in block.experts]
        )
    if isinstance(block.shared, Mlp):
        for name, change in mlp_changes(block.shared):
            yield f"shared {name}", dataclasses.replace(block, shared=dataclasses.replace(block.shared, **change))


def without_router_parts(router: Router) -> Iterator[tuple[str, Router]]:
    neutral = {"select_bias": 0.0, "n_group": 1, "scale": 1.0, "min_sum": 0.0}
    for name, value in neutral.items():
        if is_set(getattr(router, name), value):
            # An array of one scale per expert is indexed by id, so its neutral value is an array too.
            field = getattr(router, name)
            yield name, dataclasses.replace(router, **{name: np.full_like(field, value) if np.ndim(field) else value})
    if type(router).weigh is Router.weigh:
        yield "renormalise", dataclasses.replace(router, renormalise=not router.renormalise)


def mlp_changes(mlp) -> Iterator[tuple[str, dict]]:
    if not isinstance(mlp, Mlp):
        return
    for name in ("gate_bias", "up_bias", "down_bias"):
        if np.any(getattr(mlp, name)):
            yield name, {name: 0.0}
    if mlp.gate is not None and mlp.act is not swiglu:
        yield "activation", {"act": swiglu}
    if hasattr(mlp.act, "unlimited"):
        yield "limit", {"act": mlp.act.unlimited}


def is_set(value, neutral) -> bool:
    if callable(neutral):
        return value is not neutral
    return bool(np.any(np.asarray(value) != neutral))
