"""Layers packed from weights that callers keep, found again by where those lie.

An entry belongs to the storages of its weights and dies with the first of them. Whether weights
have changed is `conclave._watched`'s to say: those that were written to are packed again, into the
same memory, and those whose writes nobody counts (numpy, inference tensors) at every call.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

from conclave import _frameworks
from conclave._locks import ForkSafeLock
from conclave._watched import Watched, is_countable, place_of, version_of
from conclave.errors import ConclaveTypeError
from conclave.layer import Layer

Weights = dict[str, Any]

_lock = ForkSafeLock(threading.RLock)
_entries: dict[tuple[Any, ...], _Entry] = {}
_left_half: list[_Entry] = []  # in a child: what another thread of the parent was writing to


@dataclasses.dataclass
class _Entry:
    layer: Layer
    watched: Watched
    is_complete: bool = True  # False while a reload runs, and after one that failed


def _drop_half_written() -> None:
    """In a forked child nobody ends the reloads of other threads. Their layers are not freed
    either, in the state that they are in."""
    for key, entry in list(_entries.items()):
        if not entry.is_complete:
            _left_half.append(_entries.pop(key))


os.register_at_fork(after_in_child=_drop_half_written)


def _place_of(name: str, tensor: Any) -> tuple[Any, ...]:
    try:
        return place_of(tensor)
    except RuntimeError as error:
        raise ConclaveTypeError(
            f"{name}: expected a dense tensor, found one without memory of its own "
            f"({tensor.layout})"
        ) from error


def packed_layer(
    weights: Weights,
    rule: tuple[Any, ...],
    make: Callable[[], Layer],
    reload: Callable[[Layer], None],
) -> Layer:
    """The layer of these weights and of `rule`, which says all else that it depends on."""
    tensors = [tensor for tensor in weights.values() if tensor is not None]
    if not is_countable(tensors):
        return make()
    names = tuple(name for name, tensor in weights.items() if tensor is not None)
    key = (rule, names, *map(_place_of, names, tensors))
    found = _entries.get(key)
    if found is not None and found.is_complete and found.watched.is_current(tensors):
        return found.layer
    with _lock.now:
        found = _entries.get(key)

        def dies(_: Any) -> None:
            _entries.pop(key, None)

        watched = Watched(tensors, dies)
        if found is None or not found.watched.same_place(tensors):
            found = _entries[key] = _Entry(make(), watched)
        elif not found.is_complete or not found.watched.is_current(tensors):
            found.is_complete = False
            reload(found.layer)
            found.watched, found.is_complete = watched, True
        return found.layer


class _Bytes:
    """Memory on a GPU by its address, for torch to look at without keeping it."""

    def __init__(self, tensor: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes(),),
            "typestr": "|u1",
            "data": (tensor.untyped_storage().data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Any) -> Any:
    """The array for a kept layer. On a GPU weights are used in place and a layer keeps them, which
    would keep its own entry: there it is a view that does not."""
    if tensor is None or not _frameworks.is_torch(tensor):
        return tensor
    tensor = tensor.detach()
    if not tensor.is_cuda or version_of(tensor) is None or tensor.numel() == 0:
        return tensor
    flat = _frameworks.torch().as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def packed_layers() -> int:
    """How many layers are kept."""
    return len(_entries)


def forget_packed_layers() -> None:
    """Frees all of them; the next call with each of their weights packs again."""
    with _lock.now:
        _entries.clear()
