"""Layers packed from weights that callers keep, found again by where those lie.

An entry belongs to the storages of its weights and dies with the first of them. Updates in place
count a tensor's version up; the next call then packs again, into the same memory. What has no
version (numpy, inference tensors) is packed at every call, since a change could not be seen.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveTypeError
from conclave.layer import Layer

Weights = dict[str, Any]

_lock = threading.RLock()
_entries: dict[tuple[Any, ...], _Entry] = {}


@dataclasses.dataclass
class _Entry:
    layer: Layer
    versions: tuple[int, ...]
    owners: list[weakref.ref[Any]]


def _versioned(tensor: Any) -> bool:
    return _frameworks.is_torch(tensor) and not tensor.is_inference()


def _place_of(name: str, tensor: Any) -> tuple[Any, ...]:
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise ConclaveTypeError(
            f"{name}: expected a dense tensor, found one without memory of its own "
            f"({tensor.layout})"
        ) from error
    return address, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _owner_of(tensor: Any, dies: Callable[[Any], None]) -> weakref.ref[Any]:
    """The storage, which views and detached tensors share; the tensor, where torch cannot say."""
    owner = weakref.ref(tensor.untyped_storage(), dies)
    return owner if owner() is not None else weakref.ref(tensor, dies)


def _same_owners(entry: _Entry, tensors: list[Any]) -> bool:
    """Whether the memory is still that of the storages that were packed: one that was resized has
    left its place to others."""
    for owner, tensor in zip(entry.owners, tensors, strict=True):
        held = owner()
        if held is not tensor and held is not tensor.untyped_storage():
            return False
    return True


def packed_layer(
    weights: Weights,
    rule: tuple[Any, ...],
    make: Callable[[], Layer],
    reload: Callable[[Layer], None],
) -> Layer:
    """The layer of these weights and of `rule`, which says all else that it depends on."""
    tensors = [tensor for tensor in weights.values() if tensor is not None]
    if not all(_versioned(tensor) for tensor in tensors):
        return make()
    names = tuple(name for name, tensor in weights.items() if tensor is not None)
    key = (rule, names, *map(_place_of, names, tensors))
    versions = tuple(tensor._version for tensor in tensors)
    found = _entries.get(key)
    if found is not None and found.versions == versions and _same_owners(found, tensors):
        return found.layer
    with _lock:
        found = _entries.get(key)
        if found is None or not _same_owners(found, tensors):
            return _insert(key, tensors, versions, make())
        if found.versions != versions:
            found.versions = ()  # until the reload is complete
            reload(found.layer)
            found.versions = versions
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
    if not tensor.is_cuda or not _versioned(tensor) or tensor.numel() == 0:
        return tensor
    flat = _frameworks.torch().as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _insert(key: Any, tensors: list[Any], versions: tuple[int, ...], layer: Layer) -> Layer:
    def dies(_: Any) -> None:
        _entries.pop(key, None)

    _entries[key] = _Entry(layer, versions, [_owner_of(tensor, dies) for tensor in tensors])
    return layer


def packed_layers() -> int:
    """How many layers are kept."""
    return len(_entries)


def forget_packed_layers() -> None:
    """Frees all of them; the next call with each of their weights packs again."""
    with _lock:
        _entries.clear()
