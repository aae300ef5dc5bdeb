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
