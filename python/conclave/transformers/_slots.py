"""Where modules hold their weights, to read those that are there now."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from conclave.transformers._coded_traits import codes_of, is_coded
from conclave.transformers._traits import local_part


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one of its own kind is made of, as torchao's are; any other by itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in _parts_of(getattr(tensor, name))]


class Slots:
    """Parameters, buffers and codes of modules by their places: another tensor at a place is
    seen."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        once = list(dict.fromkeys(modules))
        holders = [h for m in once for h in (m._parameters, m._buffers)]
        self._slots = [(h, name) for h in holders for name, t in h.items() if t is not None]
        self._coded = [m for m in once if is_coded(m)]

    def tensors(self) -> list[torch.Tensor]:
        """In the same order at every call, of DTensors this process' part. Raises NotOurs for codes
        that are not there."""
        own = [part for t in self.values() for part in _parts_of(local_part(t))]
        return own + [codes for m in self._coded for codes in codes_of(m)]

    def values(self) -> list[torch.Tensor]:
        """Without codes, of which nobody requires gradients."""
        found = (holder.get(name) for holder, name in self._slots)
        return [tensor for tensor in found if tensor is not None]
