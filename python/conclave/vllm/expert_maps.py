"""Which experts of a layer this rank holds."""

from __future__ import annotations

from typing import Any

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.placement import determine_expert_map, get_compressed_expert_map
from conclave.vllm.mapping import (
    determine_expert_placement_strategy,
    ensure_round_robin_expert_routing_tables,
)
from conclave.vllm.parallel import FusedMoEParallelConfig


class ExpertMapManager:
    """The map from experts to those of this rank; None where a rank holds all.

    max_num_batched_tokens and top_k size a buffer of vLLM's and have no effect.
    """

    def __init__(
        self,
        global_num_experts: int,
        moe_parallel_config: FusedMoEParallelConfig,
        placement_strategy: str = "linear",
        num_expert_group: int | None = None,
        num_redundant_experts: int = 0,
        enable_eplb: bool = False,
        *,
        max_num_batched_tokens: int | None = None,
        top_k: int | None = None,
        num_fused_shared_experts: int = 0,
        rocm_aiter_enabled: bool = False,
    ) -> None:
        del max_num_batched_tokens, top_k
        if num_fused_shared_experts or rocm_aiter_enabled:
            raise ConclaveUnsupportedError(
                "num_fused_shared_experts, rocm_aiter_enabled: belong to kernels for other GPUs"
            )
        self.global_num_experts = global_num_experts
        self.moe_parallel_config = moe_parallel_config
        self.placement_strategy = placement_strategy
        if moe_parallel_config.use_ep:
            self.placement_strategy = determine_expert_placement_strategy(
                placement_strategy,
                moe_parallel_config,
                num_expert_group,
                num_redundant_experts,
                enable_eplb,
            )
        self.update()

    def update(self, moe_parallel_config: FusedMoEParallelConfig | None = None) -> None:
        """Computes all again, for another number of ranks if one is given."""
        if moe_parallel_config is not None:
            self.moe_parallel_config = moe_parallel_config
        split = self.moe_parallel_config
        split.check()
        self.local_num_experts, self.expert_map, self.expert_mask = determine_expert_map(
            split.ep_size if split.use_ep else 1,
            split.ep_rank,
            self.global_num_experts,
            self.placement_strategy,
            return_expert_mask=True,
        )

    def map_global_to_local(self, expert: int) -> int:
        """The local index, -1 for other ranks' experts."""
        if not 0 <= expert < self.global_num_experts:
            raise ConclaveValueError(
                f"expert_id: expected 0 to {self.global_num_experts - 1}, found {expert}"
            )
        return expert if self.expert_map is None else int(self.expert_map[expert])

    def is_local_expert(self, expert: int) -> bool:
        """Whether this rank holds it."""
        return self.map_global_to_local(expert) >= 0

    def get_local_expert_ids(self) -> list[int]:
        """The experts of this rank, ascending."""
        experts = range(self.global_num_experts)
        return [expert for expert in experts if self.is_local_expert(expert)]

    def routing_tables(self) -> tuple[Any, Any, Any] | None:
        """For transports that address experts by position; None unless placed round robin."""
        if self.expert_map is None or self.placement_strategy != "round_robin":
            return None
        split = self.moe_parallel_config
        return ensure_round_robin_expert_routing_tables(
            self.global_num_experts, split.ep_size, split.ep_rank, self.local_num_experts
        )

    def compressed(self) -> str:
        """ "0->4, 1->9": local index and expert; empty where a rank holds all."""
        return "" if self.expert_map is None else get_compressed_expert_map(self.expert_map)
