"""Layers whose plan follows the calls that they see: those behind functions and modules of other
libraries' interfaces, where nobody says how long calls will be."""

from __future__ import annotations

from conclave._devices import traits_of
from conclave.layer import Layer

# A call of more tokens than are planned for has its layer planned for the next power of two of
# them, up to this number, and as far as the plan's scratch memory is within what the device has
# as max_workspace_bytes. Longer calls run in equal chunks, of which each reads the weights once.
MAX_PLANNED_TOKENS = 16384


def growing(layer: Layer) -> Layer:
    """The layer, which from now on plans for the calls that it sees.

    One that exchanges rows keeps its plan: its ranks see calls of different lengths, and a larger
    plan is made by all of them together."""
    parallel = layer.parallel
    if parallel.ep_size > 1 and parallel.reduce == "full":
        return layer
    limit = traits_of(layer.device).max_workspace_bytes
    layer._core.grow_with_calls(MAX_PLANNED_TOKENS, limit)
    return layer
