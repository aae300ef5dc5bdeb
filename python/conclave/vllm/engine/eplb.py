"""Balancing by vLLM's class names."""

from __future__ import annotations

from typing import Any

import numpy

from conclave.vllm.eplb import EplbLayerState, map_to_physical, rebalance_experts
from conclave.vllm.mapping import build_initial_global_physical_to_logical_map


class EplbState:
    """The first placement of replicas. Moving experts is `conclave.Balancer`'s."""

    build_initial_global_physical_to_logical_map = staticmethod(
        build_initial_global_physical_to_logical_map
    )


class DefaultEplbPolicy:
    """DeepSeek's rule."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> Any:
        """[layers, num_replicas] int64: the expert of each slot, as
        `conclave.vllm.rebalance_experts` gives it first."""
        return rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
        )[0]

    @classmethod
    def preserve_intragpu_slots(
        cls, phy2log: numpy.ndarray, num_ranks: int, old_phy2log: numpy.ndarray
    ) -> numpy.ndarray:
        """[layers, slots]: the new experts of each rank, those that it had in the slots of before,
        the others in their order in what is left. As it is where slots do not divide by ranks."""
        slots = phy2log.shape[1]
        if num_ranks <= 0 or slots % num_ranks or phy2log.shape != old_phy2log.shape:
            return phy2log
        width = slots // num_ranks
        found = phy2log.copy()
        for layer in range(phy2log.shape[0]):
            for begin in range(0, slots, width):
                rank = slice(begin, begin + width)
                found[layer, rank] = _in_old_slots(phy2log[layer, rank], old_phy2log[layer, rank])
        return found


def _in_old_slots(new: numpy.ndarray, old: numpy.ndarray) -> list[int]:
    arriving = new.tolist()
    kept: list[int | None] = []
    for expert in old.tolist():
        stays = expert in arriving
        if stays:
            arriving.remove(expert)
        kept.append(expert if stays else None)
    return [arriving.pop(0) if expert is None else expert for expert in kept]


def eplb_map_to_physical_and_record(
    topk_ids: Any,
    expert_load_view: Any,
    logical_to_physical_map: Any,
    logical_replica_count: Any,
    record_enabled: Any,
    num_unpadded_tokens: Any = None,
) -> Any:
    """`conclave.vllm.map_to_physical`; num_unpadded_tokens of 0 says that no token is padding."""
    unpadded = None if num_unpadded_tokens is None else [num_unpadded_tokens]
    state = EplbLayerState(
        expert_load_view, logical_to_physical_map, logical_replica_count, record_enabled, unpadded
    )
    return map_to_physical(topk_ids, state)
