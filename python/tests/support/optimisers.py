"""Optimisers whose kernels write weights without counting it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

FUSED = ("AdamW", "SGD", "Adagrad")


def fused_step(name: str, parameters: Sequence[torch.nn.Parameter]) -> None:
    """One step by the gradients that are there. Skips where this torch has no fused kernel, which
    some optimisers say at their first step only."""
    try:
        optimiser = getattr(torch.optim, name)(parameters, lr=0.05, fused=True)
        optimiser.step()
    except (RuntimeError, TypeError) as error:
        if "fused" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")
