"""The layers whose experts a balancer moves, and the ranks that they are on."""

from __future__ import annotations

from typing import Any

import torch

from conclave._process_groups import communicator_of, from_process_group, is_group
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.vllm.ranked import RankedExperts


def layers_of(model: Any) -> list[RankedExperts]:
    """The layers that move their experts, in order. Raises ConclaveValueError where they do not go
    together."""
    given = getattr(model, "moe_layers", None)
    if given is not None:
        found = [getattr(layer, "routed_experts", layer) for layer in given]
    elif isinstance(model, torch.nn.Module):
        every = (m for m in model.modules() if isinstance(m, RankedExperts))
        found = [layer for layer in every if layer.enable_eplb]
    else:
        raise ConclaveTypeError(f"model: expected a module, found {type(model).__name__}")
    if not found:
        raise ConclaveValueError("model: expected a layer with enable_eplb, found none")
    for layer in found:
        if not isinstance(layer, RankedExperts):
            raise ConclaveTypeError(
                f"moe_layers: expected layers of conclave.vllm, found {type(layer).__name__}"
            )
        if not layer.enable_eplb:
            raise ConclaveValueError(f"enable_eplb: expected True of {layer.layer_name!r}")
        sizes = [
            (one.logical_num_experts, one.global_num_experts, one.ep_size, one.ep_rank)
            for one in (layer, found[0])
        ]
        if sizes[0] != sizes[1]:
            raise ConclaveValueError(
                f"model: expected (experts, slots, ranks, rank) of {layer.layer_name!r} as of the "
                f"first layer, {sizes[1]}, found {sizes[0]}"
            )
    return found


def group_of(layer: RankedExperts) -> Any:
    """The layer's own group of all of its ranks, else that of the process."""
    own = layer._groups.whole_group if layer._groups is not None else None
    if own is not None:
        return own
    from conclave.vllm.engine.groups import get_ep_group

    group = get_ep_group()
    return group.device_group if group.world_size > 1 else None


def worker_communicator(worker_group: Any, given: Any, layer: RankedExperts) -> Any:
    """One of the layer's ranks that nobody else uses. On every rank at the same time."""
    if worker_group is not None:
        found = communicator_of(worker_group, "worker_group")
    else:
        group = given
        if group is None and layer._groups is not None:
            group = layer._groups.given_whole_group
        group = group_of(layer) if group is None else group
        if not is_group(group):
            raise ConclaveValueError(
                "worker_group: expected a Communicator of the ranks for the worker alone, since "
                "they are no group of torch.distributed"
            )
        found = from_process_group(group)
    if found is None or (found.size, found.rank) != (layer.ep_size, layer.ep_rank):
        text = "None" if found is None else f"rank {found.rank} of {found.size}"
        raise ConclaveValueError(
            f"worker_group: expected rank {layer.ep_rank} of {layer.ep_size}, found {text}"
        )
    return found
