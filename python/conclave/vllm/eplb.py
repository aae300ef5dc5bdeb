"""Experts that several slots hold: from an expert to a slot of it, and how often each is used."""

from __future__ import annotations

import dataclasses
from typing import Any

from conclave.errors import ConclaveValueError

Tensor = Any

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: neighbouring tokens take different replicas


@dataclasses.dataclass
class EplbLayerState:
    """One layer's rows of a balancer's tensors. They are the balancer's memory, not copies."""

    expert_load_view: Any = None  # [physical], counts
    logical_to_physical_map: Any = None  # [logical, most replicas], -1 padded
    logical_replica_count: Any = None  # [logical]
    should_record_tensor: Any = None  # one bool; None: always

    def check(self) -> None:
        """Raises ConclaveValueError naming what is not set."""
        for name in ("expert_load_view", "logical_to_physical_map", "logical_replica_count"):
            if getattr(self, name) is None:
                raise ConclaveValueError(
                    f"{name}: enable_eplb needs it before forward; call set_eplb_state"
                )


def map_to_physical(
    topk_ids: Tensor, state: EplbLayerState, num_tokens: int | Tensor | None = None
) -> Tensor:
    """Slots of experts [T, k], of the type of topk_ids: token t takes replica
    (t * 0x9E3779B9 mod 2^32) mod count. An id without a replica is -1. Counts of the first
    num_tokens tokens (all by default) are added to expert_load_view; a tensor of one number is not
    waited for."""
    import torch

    state.check()
    table, counts = state.logical_to_physical_map, state.logical_replica_count
    tokens = torch.arange(topk_ids.shape[0], dtype=torch.int64, device=topk_ids.device)
    spread = ((tokens * _GOLDEN) & 0xFFFFFFFF).unsqueeze(1)
    known = (topk_ids >= 0) & (topk_ids < table.shape[0])
    logical = torch.where(known, topk_ids, 0).long()
    replica = spread % counts.long()[logical].clamp(min=1)
    physical = torch.where(known, table.long()[logical, replica], -1)
    counted = None if num_tokens is None else (tokens < num_tokens).unsqueeze(1)
    _record(physical, counted, state)
    return physical.to(topk_ids.dtype)


def _record(physical: Tensor, counted: Tensor | None, state: EplbLayerState) -> None:
    load = state.expert_load_view
    held = (physical >= 0) & (physical < load.shape[0])
    if counted is not None:
        held = held & counted
    ones = held.to(load.dtype)
    if state.should_record_tensor is not None:
        ones = ones * state.should_record_tensor.to(load.dtype)
    load.scatter_add_(0, physical.clamp(min=0, max=load.shape[0] - 1).flatten(), ones.flatten())
