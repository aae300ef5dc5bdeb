"""Balancing by vLLM's class names."""

from __future__ import annotations

from typing import Any

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
