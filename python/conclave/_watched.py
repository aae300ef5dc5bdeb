"""Whether weights are still what was packed from them: one rule for everything that keeps layers.

Weights are the same while each of them lies in the same storage at the same address, with the same
type, shape and strides, and while its version counter stands where it stood. Updates in place,
`load_state_dict` and optimiser steps move the counter, also under `torch.inference_mode()`; a
cast, a move and a new parameter change the rest. Tensors that were made in inference mode have no
counter, and arrays of other libraries neither: writes to them could not be seen, so that no layer
of them is kept while their owner may write to them (`is_countable`).

Fused optimisers write around the counter, so that their steps are counted here (`_count_steps`).
Nothing else can see such a write: through `tensor.data`, `untyped_storage()` or numpy, or by a
collective of torch.distributed (`broadcast`, `recv`, `all_reduce`, `scatter`).
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from conclave import _frameworks


def version_of(tensor: Any) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    if not _frameworks.is_torch(tensor):
        return None
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode
        return None


def is_countable(tensors: Sequence[Any]) -> bool:
    """Whether writes to all of them are seen."""
    return all(version_of(tensor) is not None for tensor in tensors)


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor lies, and as what."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _owner_of(tensor: Any, dies: Callable[[Any], None] | None) -> weakref.ref[Any]:
    """The storage, which views and detached tensors share; the tensor, where torch cannot say."""
    owner = weakref.ref(tensor.untyped_storage(), dies)
    return owner if owner() is not None else weakref.ref(tensor, dies)


_counts_steps = False


def _count_steps() -> None:
    """Counts what optimisers write from now on, with `fused=True` too; once a process."""
    global _counts_steps
    torch = _frameworks.torch()
    if _counts_steps or torch is None:
        return
    module = importlib.import_module("torch.optim.optimizer")  # no attribute of torch.optim
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None and hasattr(torch.autograd.graph, "increment_version"):
        register(_count_step)
    _counts_steps = True


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    increment = _frameworks.torch().autograd.graph.increment_version
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is None or version_of(tensor) is None:
                continue
            increment(tensor)
            if hasattr(tensor, "to_local"):  # a shard counts for itself
                increment(tensor.to_local())


class Watched:
    """Tensors of torch as they were at a time. It does not keep them.

    `dies` is called when the first of their storages goes.
    """

    __slots__ = ("_owners", "_places", "_versions")

    def __init__(self, tensors: Sequence[Any], dies: Callable[[Any], None] | None = None) -> None:
        _count_steps()
        self._places = [place_of(tensor) for tensor in tensors]
        self._owners = [_owner_of(tensor, dies) for tensor in tensors]
        self._versions: list[int | None] = [version_of(tensor) for tensor in tensors]

    def same_place(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same memory. An address alone does not tell: memory that was freed
        or resized has left its place to others."""
        if len(tensors) != len(self._places):
            return False
        for tensor, place, owner in zip(tensors, self._places, self._owners, strict=True):
            if place_of(tensor) != place:
                return False
            held = owner()
            if held is None or (held is not tensor.untyped_storage() and held is not tensor):
                return False
        return True

    def is_current(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same memory, and nothing was written to it."""
        versions = [version_of(tensor) for tensor in tensors]
        return versions == self._versions and self.same_place(tensors)
