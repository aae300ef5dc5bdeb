"""Balancing by vLLM's class names."""

from __future__ import annotations

from typing import Any

from conclave.vllm.eplb import rebalance_experts
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
