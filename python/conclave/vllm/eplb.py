"""Experts that several slots hold: from an expert to a slot of it, and how often each is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from conclave.balance import balance_experts
from conclave.balancer import Balancer
from conclave.errors import ConclaveValueError
from conclave.layer import Layer
from conclave.ranks import Communicator
from conclave.vllm.ubatching import dbo_current_ubatch_id

Tensor = Any

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: neighbouring tokens take different replicas


@dataclasses.dataclass(frozen=True)
class EPLBConfig:
    """How experts follow the load, by vLLM's names: `balancer` makes one that does so."""

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0  # of the split that layers are made with
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = True
    policy: str = "default"  # DeepSeek's

    def balancer(self, layers: Sequence[Layer], communicator: Communicator) -> Balancer:
        """A balancer of layers that have num_redundant_experts replicas.

        Args:
            layers: as of `conclave.Balancer`.
            communicator: of their ranks, for the balancer alone.

        Raises:
            ConclaveValueError: naming what does not fit.
        """
        if self.policy != "default":
            raise ConclaveValueError(f"policy: expected 'default', found {self.policy!r}")
        for layer in layers:
            found = layer.parallel.num_redundant_experts
            if found != self.num_redundant_experts:
                raise ConclaveValueError(
                    f"num_redundant_experts: expected {self.num_redundant_experts}, "
                    f"found a layer with {found}"
                )
        return Balancer(
            layers,
            communicator,
            window_size=self.window_size,
            step_interval=self.step_interval,
            log_balancedness=self.log_balancedness,
            log_balancedness_interval=self.log_balancedness_interval,
            use_async=self.use_async,
        )


@dataclasses.dataclass
class EplbLayerState:
    """One layer's rows of a balancer's tensors. They are the balancer's memory, not copies."""

    expert_load_view: Any = None  # [physical], counts
    logical_to_physical_map: Any = None  # [logical, most replicas], -1 padded
    logical_replica_count: Any = None  # [logical]
    should_record_tensor: Any = None  # one bool; None: always
    # Tokens that are no padding, for each half of a batch that takes turns; 0: all of them.
    num_unpadded_tokens_tensors: Any = None

    def set_layer_state(
        self,
        moe_layer_idx: int,
        expert_load_view: Any,
        logical_to_physical_map: Any,
        logical_replica_count: Any,
    ) -> None:
        """Takes row moe_layer_idx of a balancer's tensors, as views."""
        self.expert_load_view = expert_load_view[moe_layer_idx]
        self.logical_to_physical_map = logical_to_physical_map[moe_layer_idx]
        self.logical_replica_count = logical_replica_count[moe_layer_idx]

    def unpadded_tokens(self, tokens: int) -> Any:
        """How many of so many tokens are no padding; None: nothing says so."""
        if not self.num_unpadded_tokens_tensors:
            return None
        counts = self.num_unpadded_tokens_tensors
        count = counts[min(dbo_current_ubatch_id(), len(counts) - 1)]
        return count.where(count > 0, tokens)

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
    num_tokens tokens (by default what the state says, else all) are added to expert_load_view; a
    tensor of one number is not waited for."""
    import torch

    state.check()
    if num_tokens is None:
        num_tokens = state.unpadded_tokens(int(topk_ids.shape[0]))
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


def rebalance_experts(
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the experts of every layer, by DeepSeek's rule.

    Args:
        weight: [layers, experts] rows that each expert had.
        num_replicas: slots in all, experts and their replicas; a multiple of num_ranks.
        num_groups, num_nodes, num_ranks: groups of experts that are chosen together; nodes, which
            get whole groups; ranks of all nodes.
        old_global_expert_indices: [layers, num_replicas] the experts of the slots as they are:
            one that stays on its rank keeps its slot.

    Returns:
        int64 on the CPU: the expert of each slot [layers, num_replicas]; the slots of each expert
        [layers, experts, most replicas], -1 padded; the number of its replicas [layers, experts].

    Raises:
        AssertionError: for slots that do not divide by ranks. ConclaveValueError: for loads that
        are not finite, negative or all zero, and numbers without a meaning.
    """
    import torch

    if num_ranks < 1 or num_replicas % num_ranks != 0:
        raise AssertionError(
            f"num_replicas: expected a multiple of {num_ranks} ranks, found {num_replicas}"
        )
    loads = torch.as_tensor(weight).double().cpu()
    if loads.ndim != 2:
        raise ConclaveValueError(
            f"weight: expected shape [layers, experts], found {list(loads.shape)}"
        )
    num_experts = loads.shape[1]
    old = None if old_global_expert_indices is None else old_global_expert_indices.tolist()
    if old is not None and len(old) != len(loads):
        raise ConclaveValueError(
            f"old_global_expert_indices: expected {len(loads)} layers, found {len(old)}"
        )
    rows = [
        balance_experts(
            load,
            num_ranks=num_ranks,
            num_redundant_experts=num_replicas - num_experts,
            num_nodes=num_nodes,
            num_groups=num_groups,
            previous=None if old is None else old[layer],
            distinct_ranks=False,
        ).logical_of
        for layer, load in enumerate(loads)
    ]
    slots = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), num_replicas)
    counts = torch.zeros(loads.shape, dtype=torch.int64)
    counts.scatter_add_(1, slots, torch.ones_like(slots))
    most = int(counts.max()) if counts.numel() else 1
    physical = torch.full((*loads.shape, most), -1, dtype=torch.int64)
    for layer, experts in enumerate(rows):
        seen = [0] * num_experts
        for slot, expert in enumerate(experts):
            physical[layer, expert, seen[expert]] = slot
            seen[expert] += 1
    return slots, physical, counts
