"""A layer whose experts lie on several ranks, called with the same tokens on each of them.

Every rank runs a share of the tokens through the layer, which brings their rows to the experts and
back, and has the results of all of them at the end. No bit of a result depends on where experts
lie, which it would if each rank summed its own experts' rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from conclave import _conclave
from conclave.layer import Layer
from conclave.ranks import Communicator

_PHASE = "tokens of a block"
_OF_TOKENS = {row["name"] for row in _conclave.call_arguments() if row["shape"].startswith("[T")}
_WRITTEN = {"captured_logits", "captured_ids", "captured_weights", "shared_out"}


class DealtLayer:
    """A layer that exchanges rows, for ranks that share their tokens."""

    def __init__(self, layer: Layer, communicator: Communicator) -> None:
        self._layer, self._communicator = layer, communicator
        self._core = layer._core

    def _first_of(self, tokens: int) -> list[int]:
        ranks = self._communicator.size
        return [tokens * rank // ranks for rank in range(ranks + 1)]

    def forward(self, rows: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """As `Layer.forward`. Raises ConclaveCommError for ranks that do not come."""
        first = self._first_of(rows.shape[0])
        own = slice(first[self._communicator.rank], first[self._communicator.rank + 1])
        mine, written = dict(arguments), {}
        for name, value in arguments.items():
            if name in _WRITTEN:
                mine[name] = written[name] = torch.empty_like(value[own])
            elif name in _OF_TOKENS and isinstance(value, torch.Tensor):
                mine[name] = value[own].contiguous()
        part = torch.empty_like(rows[own])
        self._layer.forward(rows[own].contiguous(), out=part, **mine)
        for name, value in written.items():
            self._gather(value, arguments[name], first)
        out = torch.empty_like(rows)
        self._gather(part, out, first)
        return out

    def _gather(self, part: torch.Tensor, whole: torch.Tensor, first: list[int]) -> None:
        """All ranks' rows as bytes, which communicators of any type carry."""
        width = whole.shape[1] * whole.element_size()
        counts = [(end - begin) * width for begin, end in itertools.pairwise(first)]
        send = part.reshape(-1).view(torch.uint8)
        self._communicator.all_gather(send, whole.view(-1).view(torch.uint8), counts, phase=_PHASE)
