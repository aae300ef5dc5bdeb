"""Layers whose plan follows the calls that they see: those behind functions and modules of other
libraries' interfaces, where nobody says how long calls will be."""

from __future__ import annotations

from conclave.layer import Layer

# A call of more tokens than are planned for has its layer planned for the next power of two of
# them, up to this number. Longer calls run in equal chunks, of which each reads the weights once.
MAX_PLANNED_TOKENS = 16384

# And as far as the scratch memory of a plan is no more than this. A GPU's is borrowed for a call,
# for its own tokens; a CPU's is kept for the next.
MAX_WORKSPACE_BYTES_GPU = 4 << 30
MAX_WORKSPACE_BYTES_CPU = 1 << 30


def growing(layer: Layer) -> Layer:
    """The layer, which from now on plans for the calls that it sees.

    One that exchanges rows keeps its plan: its ranks see calls of different lengths, and a larger
    plan is made by all of them together."""
    parallel = layer.parallel
    if parallel.ep_size > 1 and parallel.reduce == "full":
        return layer
    limit = MAX_WORKSPACE_BYTES_CPU if layer.device == "cpu" else MAX_WORKSPACE_BYTES_GPU
    layer._core.grow_with_calls(MAX_PLANNED_TOKENS, limit)
    return layer
