"""Random layers and what they must compute, in float64 by plain numpy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy

import conclave

FLOAT32_BAR = 5e-6
HALF_BAR = 6e-3


def silu(gate: numpy.ndarray, up: numpy.ndarray) -> numpy.ndarray:
    return gate / (1 + numpy.exp(-gate)) * up


def gelu(gate: numpy.ndarray, up: numpy.ndarray) -> numpy.ndarray:
    erf = numpy.vectorize(math.erf)
    return gate * (1 + erf(gate / math.sqrt(2))) / 2 * up


def relu2(product: numpy.ndarray) -> numpy.ndarray:
    return numpy.maximum(product, 0) ** 2


@dataclasses.dataclass
class Problem:
    """Weights in the default layout, tokens and a routing for them, float32."""

    top_k: int
    gate_up: numpy.ndarray  # [E, 2I, H]
    down: numpy.ndarray  # [E, H, I]
    router: numpy.ndarray  # [E, H]
    hidden: numpy.ndarray  # [T, H]
    topk_ids: numpy.ndarray  # [T, k]
    topk_weights: numpy.ndarray  # [T, k]

    @property
    def spec(self) -> conclave.MoeSpec:
        return conclave.MoeSpec(top_k=self.top_k)

    @property
    def routing(self) -> dict[str, Any]:
        return {"topk_ids": self.topk_ids, "topk_weights": self.topk_weights}

    @property
    def weights(self) -> dict[str, Any]:
        return {"gate_up": self.gate_up, "down": self.down}

    def layer(self, **arguments: Any) -> conclave.Layer:
        """A layer without a gate."""
        return conclave.Layer.from_tensors(self.spec, **self.weights, **arguments)

    def expected(self) -> numpy.ndarray:
        return expected_output(
            self.hidden, self.gate_up, self.down, self.topk_ids, self.topk_weights
        )


def make_problem(
    random: numpy.random.Generator,
    *,
    experts: int = 6,
    top_k: int = 3,
    hidden: int = 40,
    inner: int = 28,
    tokens: int = 9,
) -> Problem:
    normal = random.standard_normal
    ids = numpy.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype("int32")
    return Problem(
        top_k=top_k,
        gate_up=(normal((experts, 2 * inner, hidden)) / math.sqrt(hidden)).astype("float32"),
        down=(normal((experts, hidden, inner)) / math.sqrt(inner)).astype("float32"),
        router=normal((experts, hidden)).astype("float32"),
        hidden=normal((tokens, hidden)).astype("float32"),
        topk_ids=ids,
        topk_weights=random.random((tokens, top_k)).astype("float32"),
    )


def expert_rows(
    rows: numpy.ndarray, gate_up: numpy.ndarray, down: numpy.ndarray, activation: Any = silu
) -> numpy.ndarray:
    """One expert's MLP on rows [n, H], float64."""
    product = rows @ gate_up.T
    if activation is relu2:
        return relu2(product) @ down.T
    inner = product.shape[1] // 2
    return activation(product[:, :inner], product[:, inner:]) @ down.T


def expected_output(
    hidden: Any,
    gate_up: Any,
    down: Any,
    topk_ids: Any,
    topk_weights: Any,
    activation: Any = silu,
) -> numpy.ndarray:
    """The routed sum [T, H]; ids outside [0, E) contribute nothing."""
    hidden, gate_up, down, weights = (
        numpy.asarray(a, dtype="float64") for a in (hidden, gate_up, down, topk_weights)
    )
    ids = numpy.asarray(topk_ids)
    total = numpy.zeros_like(hidden)
    for expert in range(len(gate_up)):
        tokens, slots = numpy.nonzero(ids == expert)
        rows = expert_rows(hidden[tokens], gate_up[expert], down[expert], activation)
        numpy.add.at(total, tokens, weights[tokens, slots, None] * rows)
    return total


def _float64(array: Any) -> numpy.ndarray:
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return numpy.asarray(array).astype("float64")


def worst_error(actual: Any, expected: Any, at_least: Any = 0.0) -> float:
    """The largest relative L2 error of a token. at_least: of each token, what the error is held to
    where the expected row is shorter."""
    actual, expected = _float64(actual), _float64(expected)
    assert actual.shape == expected.shape
    if expected.size == 0:
        return 0.0
    difference = numpy.linalg.norm(actual - expected, axis=1)
    scale = numpy.maximum(numpy.linalg.norm(expected, axis=1), _float64(at_least))
    errors = difference / numpy.maximum(scale, 1e-30)
    return float(numpy.where(numpy.isfinite(errors), errors, numpy.inf).max())
