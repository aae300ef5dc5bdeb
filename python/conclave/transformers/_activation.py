"""Which activation a module of transformers computes, found out by evaluating it.

Modules say what they compute only in code, under names that change between versions and model
families. A few numbers put through that code tell the formula, its parameters, and whether gate and
up rows alternate; docs/numerics.md has the formulas.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conclave.spec import ActivationSpec

_RANGE = 40.0  # beyond every published limit
_POINTS = 96
_TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Found:
    """An activation and how the rows of gate and up lie."""

    activation: ActivationSpec
    order: str  # "concatenated", "interleaved"


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 2


_PLAIN = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
NO_MUL = {f"{name}_no_mul": formula for name, formula in _PLAIN.items()} | {"relu2_no_mul": _relu2}


def _clamped(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.clamp(-limit, limit)


def _with_limit(limit: float) -> Iterator[tuple[ActivationSpec, Callable]]:
    yield (
        ActivationSpec(name="silu_clamp_before", limit=limit),
        lambda g, u: _silu(g.clamp(max=limit)) * _clamped(u, limit),
    )
    yield (
        ActivationSpec(name="silu_clamp_after", limit=limit),
        lambda g, u: _silu(g).clamp(max=limit) * _clamped(u, limit),
    )


def _swiglu_oai(alpha: float, limit: float) -> tuple[ActivationSpec, Callable]:
    bound = limit or math.inf

    def formula(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g = g.clamp(max=bound)
        return (_clamped(u, bound) + 1) * g * torch.sigmoid(alpha * g)

    return ActivationSpec(name="swiglu_oai", alpha=alpha, beta=1.0, limit=limit), formula


def _situ(beta: float, linear: float) -> tuple[ActivationSpec, Callable]:
    def formula(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        bent = linear * torch.tanh(u / linear) if linear else u
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * bent

    return ActivationSpec(name="situ", beta=beta, linear_beta=linear), formula


def candidates(numbers: list[float]) -> Iterator[tuple[ActivationSpec, Callable]]:
    """Formulas of gate and up, the usual ones first."""
    for name, plain in _PLAIN.items():
        yield ActivationSpec(name=name), lambda g, u, plain=plain: plain(g) * u
    for limit in numbers:
        yield from _with_limit(limit)
    for alpha, limit in itertools.product([1.702, *numbers], [0.0, *numbers]):
        yield _swiglu_oai(alpha, limit)
    for beta, linear in itertools.product(numbers, [0.0, *numbers]):
        yield _situ(beta, linear)


def numbers_of(*objects: Any) -> list[float]:
    """Positive numbers among the attributes: one of them may be a limit."""
    found: dict[float, None] = {}
    for thing in objects:
        for value in list(getattr(thing, "__dict__", {}).values()):
            if isinstance(value, float) and 0.001 <= value <= 1e6:
                found.setdefault(value)
    return list(found)


def _evaluate(apply: Callable, points: torch.Tensor) -> Any:
    """In float64, where torch's own functions err by nothing that shows. In float32 their GELU errs
    by more than formulas may differ; it is for code that mixes in values of its own type."""
    try:
        return apply(points)
    except (RuntimeError, TypeError):
        return apply(points.float())


def _agree(actual: Any, expected: torch.Tensor) -> bool:
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    error = (actual.double() - expected).abs()
    return bool((error <= _TOLERANCE * expected.abs().clamp(min=1.0)).all())


def _points(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, points] of gate and up: large and small, of both signs, in no common order."""
    step = torch.arange(_POINTS, dtype=torch.float64, device=device)
    gate = _RANGE * torch.sin(1.0 + 0.7 * step) * (step % 7 + 1) / 7
    up = _RANGE * torch.cos(2.0 + 1.3 * step) * (step % 5 + 1) / 5
    return gate.float().double()[None], up.float().double()[None]


def identify_gated(apply: Callable, device: torch.device, *owners: Any) -> Found | None:
    """The activation of `apply`, which takes [n, 2I] and returns [n, I]; None: none of ours.

    `owners` are objects whose attributes may hold the parameters.
    """
    gate, up = _points(device)
    numbers = numbers_of(*owners)
    with torch.no_grad():
        for order in ("concatenated", "interleaved"):
            if order == "concatenated":
                both = torch.cat([gate, up], dim=-1)
            else:
                both = torch.stack([gate, up], dim=-1).flatten(-2)
            actual = _evaluate(apply, both)
            for activation, formula in candidates(numbers):
                if _agree(actual, formula(gate, up)):
                    return Found(activation, order)
    return None


def identify_plain(apply: Callable, device: torch.device) -> Found | None:
    """The activation of `apply`, which takes and returns [n, I], without a gate."""
    points, _ = _points(device)
    with torch.no_grad():
        actual = _evaluate(apply, points)
        for name, formula in NO_MUL.items():
            if _agree(actual, formula(points)):
                return Found(ActivationSpec(name=name), "concatenated")
    return None
