"""Float64 Mixture-of-Experts blocks from the published formulas, in numpy alone.

Nothing here knows transformers. A family fills a Block with arrays read from disk by its own names;
a Router says how logits become ids and weights. Nothing is rounded on the way.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
TINY = 1e-20


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sqrt_softplus(x: Array) -> Array:
    return np.sqrt(np.logaddexp(0.0, x))


def identity(x: Array) -> Array:
    return x


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def relu2(x: Array) -> Array:
    return np.maximum(x, 0.0) ** 2


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def geglu_tanh(gate: Array, up: Array) -> Array:
    return gelu_tanh(gate) * up


def swiglu_oai(alpha: float, limit: float) -> Callable[[Array, Array], Array]:
    """(u + 1) * g * sigmoid(alpha g), g clamped from above, u from both sides."""

    def act(gate: Array, up: Array) -> Array:
        gate = np.minimum(gate, limit)
        return (np.clip(up, -limit, limit) + 1.0) * gate * sigmoid(alpha * gate)

    if np.isfinite(limit):
        act.unlimited = swiglu_oai(alpha, np.inf)
    return act


def swiglu_clamped(limit: float) -> Callable[[Array, Array], Array]:
    """silu(min(g, limit)) * clamp(u): clamps before the activation."""

    def act(gate: Array, up: Array) -> Array:
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)

    act.unlimited = swiglu
    return act


def swiglu_clamped_after(limit: float) -> Callable[[Array, Array], Array]:
    """min(silu(g), limit) * clamp(u): clamps after the activation."""

    def act(gate: Array, up: Array) -> Array:
        return np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)

    act.unlimited = swiglu
    return act


@dataclasses.dataclass
class Mlp:
    """down(act(gate x, up x)); gate None: down(act(up x)). Weights are [out, in]."""

    up: Array
    down: Array
    gate: Array | None = None
    gate_bias: Array | float = 0.0
    up_bias: Array | float = 0.0
    down_bias: Array | float = 0.0
    act: Callable = swiglu

    def __call__(self, x: Array) -> Array:
        up = x @ self.up.T + self.up_bias
        inner = self.act(up) if self.gate is None else self.act(x @ self.gate.T + self.gate_bias, up)
        return inner @ self.down.T + self.down_bias


@dataclasses.dataclass
class Router:
    """logits [T, E] -> ids [T, k] in order of selection -> weights [T, k].

    Covers the score-then-top-k family; another kind of router overrides choice_scores or weigh.
    """

    top_k: int
    score: Callable[[Array], Array] = softmax
    select_bias: Array | float = 0.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2"  # sum of the two best biased scores, or "max"
    masked_score: float = -np.inf  # of the experts of groups not kept
    renormalise: bool = False
    eps: float = 0.0  # added to the sum
    min_sum: float = 0.0  # lower limit of the sum
    scale: float = 1.0

    def choice_scores(self, logits: Array) -> Array:
        """What top-k compares."""
        scores = self.score(logits) + self.select_bias
        if self.n_group == 1:
            return scores
        tokens, experts = scores.shape
        groups = scores.reshape(tokens, self.n_group, experts // self.n_group)
        ranked = -np.sort(-groups, axis=-1)
        worth = ranked[..., 0] if self.group_score == "max" else ranked[..., :2].sum(axis=-1)
        kept = np.argsort(-worth, axis=-1, kind="stable")[:, : self.topk_group]
        keeps = np.zeros(worth.shape, dtype=bool)
        np.put_along_axis(keeps, kept, True, axis=-1)
        return np.where(keeps[..., None], groups, self.masked_score).reshape(tokens, experts)

    def select(self, logits: Array, token_ids: Array | None = None) -> Array:
        order = np.argsort(-self.choice_scores(logits), axis=-1, kind="stable")
        return order[:, : self.top_k]

    def decisions(self, logits: Array, token_ids: Array | None = None) -> Array:
        """[T, n] of everything discontinuous in the logits, compared to find decisive tokens."""
        return self.select(logits, token_ids)

    def weigh(self, logits: Array, ids: Array) -> Array:
        weights = np.take_along_axis(self.score(logits), ids, axis=-1)
        if self.renormalise:
            total = weights.sum(axis=-1, keepdims=True) + self.eps
            weights = weights / np.maximum(total, self.min_sum)
        return weights * self.scale


@dataclasses.dataclass
class LogitChoice(Router):
    """Top-k on the logits (plus the selection bias); the score only makes the weights."""

    def choice_scores(self, logits: Array) -> Array:
        return logits + self.select_bias


@dataclasses.dataclass
class ChosenSoftmax(LogitChoice):
    """Top-k on the logits, softmax over the chosen ones only."""

    def weigh(self, logits: Array, ids: Array) -> Array:
        return softmax(np.take_along_axis(logits, ids, axis=-1)) * self.scale


@dataclasses.dataclass
class Block:
    """One MoE block: y = sum_k w_k * expert_k(x) * output_scale + shared(x) + output_bias."""

    router: Router
    router_weight: Array  # [E, H]
    experts: list[Mlp]
    router_bias: Array | float = 0.0
    router_norm: Callable[[Array], Array] = identity
    shared: Callable[[Array], Array] | None = None
    weight_on_input: bool = False
    output_scale: float = 1.0
    output_bias: Array | float = 0.0
    latent_in: Callable[[Array], Array] = identity
    latent_out: Callable[[Array], Array] = identity

    def logits(self, router_input: Array) -> Array:
        return self.router_norm(router_input) @ self.router_weight.T + self.router_bias

    def routed(self, x: Array, ids: Array, weights: Array) -> Array:
        """Ids at or above the number of experts are identity experts."""
        x = self.latent_in(x)
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            tokens, slots = np.nonzero(ids == expert)
            run = self.experts[expert] if expert < len(self.experts) else identity
            factor = weights[tokens, slots, None]
            rows = run(x[tokens] * factor) if self.weight_on_input else run(x[tokens]) * factor
            np.add.at(out, tokens, rows)
        return self.latent_out(out)

    def output(self, x: Array, ids: Array, weights: Array, logits: Array, extra: dict[str, Array]) -> Array:
        """extra: the recorded side inputs by name, for families whose blocks take some."""
        out = self.routed(x, ids, weights) * self.output_scale + self.output_bias
        return out if self.shared is None else out + self.shared(x)
