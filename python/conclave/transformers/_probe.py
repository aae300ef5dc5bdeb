"""A replacement is tried on a few tokens before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conclave.transformers._traits import NotOurs

TOKENS = 64
# Of one token's output.
_ERROR = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}
# Share of the tokens that may be further off: where scores are rounded to 8 bits, or sigmoids of
# large hidden states are all 1, experts tie, and which of them torch chooses is not defined.
_FLIPS = {torch.float32: 0.1, torch.float16: 0.1, torch.bfloat16: 0.2}


def probe_hidden(module: torch.nn.Module, hidden_size: int, seed: int = 5) -> torch.Tensor:
    """[1, TOKENS, H] of the type and on the device of a module's weights, codes apart."""
    every = [*module.parameters(), *module.buffers()]
    weights = next((w for w in every if w.dtype in _ERROR), every[0])
    dtype = weights.dtype if weights.dtype in _ERROR else torch.bfloat16
    numbers = torch.Generator("cpu").manual_seed(seed)
    hidden = torch.randn(1, TOKENS, hidden_size, generator=numbers, device="cpu")
    # Small and large, as residuals are.
    hidden *= torch.logspace(-1, 1, TOKENS, device="cpu")[:, None]
    return hidden.to(dtype).to(weights.device)


def call_original(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """A block of unknown code, run on its own. Raises NotOurs if it does not run."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise NotOurs(f"the block does not run by itself: {error}") from error


def require_called(block: torch.nn.Module, experts: torch.nn.Module, hidden: torch.Tensor) -> None:
    """Raises NotOurs unless a block calls its experts' forward with rows, ids and weights: some
    hand them what their own kernels alone read, or call another method."""
    calls = []

    def listen(
        hidden_states: torch.Tensor,
        top_k_index: Any = None,
        top_k_weights: Any = None,
        *args: Any,
        **_: Any,
    ) -> torch.Tensor:
        calls.append(not args and _are_choices(top_k_index, top_k_weights, len(hidden_states)))
        return torch.zeros_like(hidden_states)

    former = experts.__dict__.get("forward")
    experts.forward = listen
    try:
        with torch.no_grad():
            call_original(block.forward, hidden)
    finally:
        if former is None:
            del experts.forward
        else:
            experts.forward = former
    reason = f"{type(block).__name__} does not call the forward of {type(experts).__name__}"
    if not calls:
        raise NotOurs(reason)
    if not all(calls):
        raise NotOurs(f"{reason} with ids and weights")


def _are_choices(ids: Any, weights: Any, tokens: int) -> bool:
    """Whether these are ids and weights as `experts_forward` takes them."""
    if not all(isinstance(t, torch.Tensor) and len(t) == tokens for t in (ids, weights)):
        return False
    return not ids.is_floating_point() and weights.is_floating_point()


def differ_by(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative distance of the worst token that counts; infinite for another shape."""
    if actual.numel() != expected.numel():
        return float("inf")
    flips = int(_FLIPS[expected.dtype] * TOKENS)
    actual = actual.reshape(TOKENS, -1).double()
    expected = expected.reshape(TOKENS, -1).double()
    size = expected.norm(dim=1).clamp(min=1e-30)
    errors = ((actual - expected).norm(dim=1) / size).nan_to_num(nan=float("inf"))
    return float(errors.sort().values[TOKENS - 1 - flips])


def bar_of(hidden: torch.Tensor) -> float:
    return _ERROR[hidden.dtype]


def require_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises NotOurs for results of another formula."""
    error = differ_by(actual, expected)
    if not error <= bar_of(expected):
        raise NotOurs(f"results differ by {error:.1e}: another formula")
