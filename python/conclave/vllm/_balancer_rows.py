"""Which rows of a balancer's tensors are a layer's, and whether they can be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError


class BalancerRows(NamedTuple):
    """Views of one layer's rows."""

    expert_load_view: torch.Tensor  # [physical]
    logical_to_physical_map: torch.Tensor  # [logical, replicas]
    logical_replica_count: torch.Tensor  # [logical]


def rows_of_layer(
    layer: int, physical: int, logical: int, given: dict[str, torch.Tensor]
) -> BalancerRows:
    """Row `layer` of [layers, physical], [layers, logical, replicas] and [layers, logical].

    An expert that the map does not have would serve no token, and a count that it has no places for
    would read past it. On a GPU numbers are not waited for, and counts not compared.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the tensor.
    """
    wanted: dict[str, list[int | str]] = {
        "expert_load_view": ["layers", physical],
        "logical_to_physical_map": ["layers", logical, "replicas"],
        "logical_replica_count": ["layers", logical],
    }
    for name, shape in wanted.items():
        _check(name, given[name], shape, layer)
    found = BalancerRows(**{name: tensor[layer] for name, tensor in given.items()})
    counts, places = found.logical_replica_count, found.logical_to_physical_map.shape[1]
    if counts.device.type == "cpu" and bool((counts > places).any()):
        raise ConclaveValueError(
            f"logical_replica_count: expected at most {places} as logical_to_physical_map has "
            f"places, found {int(counts.max())}"
        )
    return found


def _check(name: str, tensor: torch.Tensor, shape: list[int | str], layer: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConclaveTypeError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ConclaveTypeError(f"{name}: expected integers, found {tensor.dtype}")
    fits = tensor.ndim == len(shape) and all(
        isinstance(want, str) or size == want
        for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        text = ", ".join(str(size) for size in shape)
        raise ConclaveValueError(f"{name}: expected shape [{text}], found {list(tensor.shape)}")
    if not 0 <= layer < tensor.shape[0]:
        raise ConclaveValueError(
            f"moe_layer_idx: expected 0 to {tensor.shape[0] - 1}, rows of {name}, found {layer}"
        )
