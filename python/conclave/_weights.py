"""Weights that a caller passes as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conclave import _frameworks, _gradients


def given_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that there are, finished on their device. Raises where autograd would expect
    gradients of them, which no forward computes."""
    found = {name: value for name, value in weights.items() if value is not None}
    _gradients.refuse(found)
    for value in found.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        _frameworks.synchronize(first)
    return found
