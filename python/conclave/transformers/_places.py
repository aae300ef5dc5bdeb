"""The names of a model's weights, and where each of them lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conclave.transformers._release import freed_of
from conclave.transformers._split import whole


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter or buffer of one module."""

    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> Any:
        found = self.module._parameters.get(self.name)
        return self.module._buffers.get(self.name) if found is None else found

    @property
    def is_released(self) -> bool:
        """Whether its values are in a packed layer alone."""
        return self.name in freed_of(self.module) and self.tensor.numel() == 0

    @property
    def kind(self) -> tuple[torch.Size, torch.dtype]:
        """Shape of the whole and type, also of what was released."""
        if self.is_released:
            return freed_of(self.module)[self.name]
        return self.tensor.shape, self.tensor.dtype

    def prepared(self, value: torch.Tensor) -> torch.Tensor:
        """The value as `write` takes it: a process' part of it where the place holds a part.
        Allocates."""
        tensor = self.tensor
        if self.is_released:
            return value.to(device=tensor.device, dtype=tensor.dtype, copy=True)
        if not hasattr(tensor, "to_local"):
            return value
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(
            value.to(tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
        return spread.to_local()

    def write(self, prepared: torch.Tensor) -> None:
        """Allocates nothing for values of the place's own type and device."""
        tensor = self.tensor
        if self.is_released:
            tensor.data = prepared
            return
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with torch.no_grad():
            local.copy_(prepared)


def places_below(module: torch.nn.Module, path: str = "") -> dict[str, Place]:
    """The names that `state_dict` has for what lies below a path, each with its place."""
    found = {}
    root = module.get_submodule(path)
    for above, part in root.named_modules(prefix=path, remove_duplicate=False):
        own = {n for n in part._buffers if n not in part._non_persistent_buffers_set}
        for name in (*part._parameters, *sorted(own)):
            place = Place(part, name)
            if place.tensor is not None:
                found[f"{above}.{name}" if above else name] = place
    return found


def as_given(name: str, value: Any, place: Place) -> torch.Tensor:
    """A value of a place, in its type and whole. Raises ConclaveTypeError, ConclaveValueError."""
    from conclave.errors import ConclaveTypeError, ConclaveValueError

    if not isinstance(value, torch.Tensor):
        raise ConclaveTypeError(f"{name}: expected a tensor, found {type(value).__name__}")
    shape, dtype = place.kind
    if value.is_meta or value.shape != shape:
        found = "one on the meta device" if value.is_meta else str(tuple(value.shape))
        raise ConclaveValueError(f"{name}: expected a tensor {tuple(shape)}, found {found}")
    if value.is_floating_point() != dtype.is_floating_point:
        raise ConclaveValueError(f"{name}: expected {dtype}, found {value.dtype}")
    return whole(value.detach()).to(dtype)
