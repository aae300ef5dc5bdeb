"""Layers packed from weights that callers keep, found again by where those lie.

An entry belongs to the storages of its weights and dies with the first of them. Whether weights
have changed is `conclave._watched`'s to say: those that were written to are packed again, into the
same memory, and those whose writes nobody counts (numpy, inference tensors) at every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
import weakref
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


def has_dense_rows(array: Any) -> bool:
    """Whether a GPU can read an array's rows where they lie: columns side by side, rows one after
    the other, with or without gaps."""
    strides = _frameworks.strides_of(array)
    shape = array.shape
    if strides is None or not strides or 0 in shape:
        return True
    columns_are_dense = shape[-1] == 1 or strides[-1] == 1
    return columns_are_dense and (len(shape) < 2 or shape[-2] == 1 or strides[-2] >= shape[-1])


_copied: dict[int, weakref.ref[Any]] = {}  # by address: storages whose copying was said


def _warn_of_copy(name: str, array: Any) -> None:
    """Once for each storage."""
    storage = array.untyped_storage() if _frameworks.is_torch(array) else array
    place = storage.data_ptr() if _frameworks.is_torch(array) else id(array)
    found = _copied.get(place)
    if found is not None and found() is not None:
        return
    with contextlib.suppress(TypeError):  # of a library whose arrays have no weak references
        _copied[place] = weakref.ref(storage, lambda _: _copied.pop(place, None))
    warnings.warn(
        f"{name}: its rows do not lie densely (strides {_frameworks.strides_of(array)}); a GPU "
        "gets a contiguous copy, which takes as much memory again and is made anew where the "
        "weights change. Pass contiguous weights to do without",
        stacklevel=2,
    )


def readable(array: Any, name: str) -> Any:
    """The array as a kept layer can read it: borrowed, or for a GPU that needs its rows dense a
    contiguous copy, of which one warning tells."""
    if getattr(array, "shape", None) is None or _frameworks.device_of(array) == "cpu":
        return borrowed(array)
    if has_dense_rows(array):
        return borrowed(array)
    _warn_of_copy(name, array)
    return _frameworks.contiguous(array)


def packed_layers() -> int:
    """How many layers are kept."""
    return len(_entries)


def forget_packed_layers() -> None:
    """Frees all of them; the next call with each of their weights packs again."""
    with _lock.now:
        _entries.clear()
