"""Which part of a layer a rank holds, and what the layer says of itself."""

from __future__ import annotations

import re
from typing import Any

import torch

from conclave import _gradients
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._balancer_rows import rows_of_layer
from conclave.vllm._operator import sum_over_ranks
from conclave.vllm._rank_groups import RankGroups
from conclave.vllm.eplb import EplbLayerState
from conclave.vllm.expert_maps import ExpertMapManager
from conclave.vllm.mapping import ensure_round_robin_expert_routing_tables
from conclave.vllm.parallel import FusedMoEConfig, FusedMoEParallelConfig
from conclave.vllm.parameters import ExpertParameters
from conclave.vllm.weights import Columns


class RankedExperts(ExpertParameters):
    """Experts of one rank. The class that derives makes them and runs them."""

    moe_parallel_config: FusedMoEParallelConfig
    moe_config: FusedMoEConfig
    intermediate_size: int
    global_num_experts: int
    logical_num_experts: int
    top_k: int
    enable_eplb: bool
    reduce_results: bool
    apply_router_weight_on_input: bool
    swiglu_limit: float | None
    eplb_state: EplbLayerState
    _groups: RankGroups | None
    _gate: torch.nn.Module | None
    _shared_experts: torch.nn.Module | None

    def _columns(self, intermediate_size: int) -> int:
        """This rank's columns, before it is known in what units they are cut."""
        self.intermediate_size = self._all_columns = intermediate_size
        self._own_columns = Columns.of(intermediate_size, 1, self.tp_rank, self.tp_size)
        return self._own_columns.held

    def _check_replicas(self, redundant: int) -> None:
        split = self.moe_parallel_config
        if redundant and not self.enable_eplb:
            raise ConclaveValueError(
                f"num_redundant_experts: Redundant experts are only supported with EPLB, "
                f"found {redundant}"
            )
        if self.enable_eplb and split.use_ep and self.global_num_experts % split.ep_size != 0:
            raise ConclaveValueError(
                "num_experts: EPLB currently only supports even distribution of experts across "
                f"ranks. Got {self.global_num_experts} experts and {split.ep_size} EP ranks."
            )

    def _place(self) -> None:
        self.local_num_experts = self._experts.local_num_experts
        self.register_buffer("_expert_map", self._experts.expert_map, persistent=False)
        self.register_buffer("expert_mask", self._experts.expert_mask, persistent=False)

    @property
    def tp_size(self) -> int:
        return self.moe_parallel_config.tp_size

    @property
    def tp_rank(self) -> int:
        return self.moe_parallel_config.tp_rank

    @property
    def ep_size(self) -> int:
        return self.moe_parallel_config.ep_size

    @property
    def ep_rank(self) -> int:
        return self.moe_parallel_config.ep_rank

    @property
    def use_ep(self) -> bool:
        return self.moe_parallel_config.use_ep

    @property
    def dp_size(self) -> int:
        return self.moe_parallel_config.dp_size

    @property
    def pcp_size(self) -> int:
        return self.moe_parallel_config.pcp_size

    @property
    def sp_size(self) -> int:
        return self.moe_parallel_config.sp_size

    @property
    def is_sequence_parallel(self) -> bool:
        return self.moe_parallel_config.is_sequence_parallel

    @property
    def expert_map_manager(self) -> ExpertMapManager:
        """Which experts are here."""
        return self._experts

    @property
    def expert_placement_strategy(self) -> str:
        """linear or round_robin, as it is done."""
        return self._experts.placement_strategy

    @property
    def vllm_config(self) -> None:
        """None: there is no engine's configuration."""

    @property
    def num_fused_shared_experts(self) -> int:
        """0, as the next two: kernels for other GPUs."""
        return 0

    @property
    def rocm_aiter_fmoe_enabled(self) -> bool:
        return False

    @property
    def aiter_fmoe_shared_expert_enabled(self) -> bool:
        return False

    @property
    def use_overlapped(self) -> bool:
        """Whether the layer runs the shared experts itself: where it has any."""
        return self._shared_experts is not None

    @property
    def layer_id(self) -> int:
        """The number in the layer's name."""
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", self.layer_name)
        if len(numbers) != 1:
            raise ConclaveValueError(
                f"prefix: expected a name with one number, found {self.layer_name!r}"
            )
        return int(numbers[0])

    @property
    def gate(self) -> torch.nn.Module | None:
        return self._gate

    @property
    def shared_experts(self) -> torch.nn.Module | None:
        return self._shared_experts

    @property
    def is_internal_router(self) -> bool:
        return self._gate is not None

    @property
    def routed_experts(self) -> RankedExperts:
        """The owner of the experts' parameters, for code written for vLLM's runner: this."""
        return self

    @property
    def expert_map(self) -> torch.Tensor | None:
        """[num_experts + redundant] int32, -1 for other ranks' experts; None: all are here."""
        found: torch.Tensor | None = self._expert_map  # type: ignore[assignment]
        return found

    def _check_shared_sum(self) -> None:
        split = self.moe_parallel_config
        apart = max(split.dp_size, split.pcp_size, split.sp_size)
        if self._groups is not None:
            return
        if self.reduce_results and self._shared_experts is not None and apart > 1:
            raise ConclaveUnsupportedError(
                "reduce_results: shared experts are split over tp ranks only, so that a sum over "
                f"dp, pcp or sp ranks ({apart}) would count them more than once; give the groups, "
                "or sum what forward returns"
            )

    @property
    def _sums_up(self) -> bool:
        return self.reduce_results and not self.moe_config.skip_final_all_reduce

    def _leads_sum(self) -> bool:
        if self._groups is not None:
            return self._groups.leads_sum
        return self.tp_rank == 0 and self.ep_rank == 0

    def _reduced(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over ranks with reduce_results, else the rows, in a type: over groups rounded
        once."""
        if not self._sums_up or self.tp_size * self.ep_size == 1:
            return rows.to(dtype)
        if torch.compiler.is_compiling():
            return sum_over_ranks(self, rows).to(dtype)
        _gradients.refuse({"shared_experts": rows})
        if self._groups is not None:
            return self._groups.sum(rows).to(dtype)
        return self._sum_over_ranks(rows.to(dtype))

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether routed rows are whole on every rank already, so that shared ones must be."""
        return self.moe_parallel_config.use_all2all_kernels

    def maybe_all_reduce_tensor_model_parallel(
        self, final_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """The sum over all ranks of the split, by the groups given, or the default group of
        torch.distributed."""
        if self.tp_size * self.ep_size == 1:
            return final_hidden_states
        if torch.compiler.is_compiling():
            return sum_over_ranks(self, final_hidden_states)
        return self._sum_over_ranks(final_hidden_states)

    def _sum_over_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum, of the rows' type. Rows may be written to."""
        ranks = self.tp_size * self.ep_size
        if self._groups is not None:
            return self._groups.sum(rows).to(rows.dtype)
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks):
            raise ConclaveUnsupportedError(
                f"reduce_results: a sum over {ranks} ranks needs a default process group of that "
                "size; or sum what forward returns"
            )
        dist.all_reduce(rows)
        return rows

    def _maybe_init_expert_routing_tables(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Tables of experts that are placed round robin, for transports that address experts by
        position; None where none is asked for or experts lie in order. They are buffers of the
        layer, made again by `update_expert_map`."""
        if not self.moe_parallel_config.use_deepep_ll_kernels:
            return None
        tables: Any = self._experts.routing_tables()
        if tables is None:
            return None
        names = ("global_to_physical", "physical_to_global", "local_to_global")
        for name, table in zip(names, tables, strict=True):
            placed = table.to(self._expert_map.device)
            self.register_buffer(f"expert_{name}", placed, persistent=False)
        found = tuple(getattr(self, f"expert_{name}") for name in names)
        return found[0], found[1], found[2]

    def extra_repr(self) -> str:
        return (
            f"global_num_experts={self.global_num_experts}, "
            f"local_num_experts={self.local_num_experts}, top_k={self.top_k}, "
            f"intermediate_size_per_partition={self.intermediate_size_per_partition}, "
            f"tp_size={self.tp_size}, ep_size={self.ep_size}, "
            f"reduce_results={self.reduce_results}"
        )

    @staticmethod
    def ensure_round_robin_expert_routing_tables(
        global_num_experts: int,
        ep_size: int,
        ep_rank: int,
        local_num_experts: int,
        device: torch.device | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tables global to physical [E], physical to global [E], local to global, int64."""
        return ensure_round_robin_expert_routing_tables(
            global_num_experts, ep_size, ep_rank, local_num_experts, device
        )

    def update_expert_map(self, moe_parallel_config: FusedMoEParallelConfig | None = None) -> None:
        """Computes the map again after the number of ranks changed. Where that changes the number
        of local experts, the caller gives parameters of the new size before the next forward."""
        if self._expert_map is None:
            raise ConclaveValueError("expert_map: there is none to update without EP")
        if moe_parallel_config is not None:
            if self._groups is not None and moe_parallel_config != self.moe_parallel_config:
                raise ConclaveUnsupportedError(
                    "moe_parallel_config: the layer's groups have the ranks that they had; make a "
                    "layer of the new groups"
                )
            self.moe_parallel_config = moe_parallel_config
        self._experts.update(self.moe_parallel_config)
        device = self._expert_map.device
        self._place()
        for name in ("_expert_map", "expert_mask"):
            buffer = getattr(self, name)
            setattr(self, name, None if buffer is None else buffer.to(device))
        self._maybe_init_expert_routing_tables()

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Takes row moe_layer_idx of a balancer's tensors, as views: [layers, physical],
        [layers, logical, replicas], [layers, logical]. Raises ConclaveValueError or
        ConclaveTypeError for tensors of other experts."""
        rows = rows_of_layer(
            moe_layer_idx,
            self.global_num_experts,
            self.logical_num_experts,
            {
                "expert_load_view": expert_load_view,
                "logical_to_physical_map": logical_to_physical_map,
                "logical_replica_count": logical_replica_count,
            },
        )
        for name, row in rows._asdict().items():
            setattr(self.eplb_state, name, row)
