"""Where modules hold their weights, to read those that are there now."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Slots:
    """Parameters and buffers of modules by their places: another parameter at a place is seen."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        holders = [h for m in dict.fromkeys(modules) for h in (m._parameters, m._buffers)]
        self._slots = [(h, name) for h in holders for name, t in h.items() if t is not None]

    def tensors(self) -> list[torch.Tensor]:
        """In the same order at every call."""
        found = (holder.get(name) for holder, name in self._slots)
        return [tensor for tensor in found if tensor is not None]
