"""Which checkpoint tensor goes to which parameter, and which expert to which rank."""

from __future__ import annotations

import enum
import warnings
from typing import Any

from conclave.errors import ConclaveValueError
from conclave.placement import determine_expert_placement_strategy as _choose_strategy
from conclave.placement import round_robin_routing_tables
from conclave.vllm.parallel import FusedMoEParallelConfig

Array = Any
Row = tuple[str, str, int, str]  # parameter, weight's name, physical expert, shard


class FusedMoeWeightScaleSupported(enum.Enum):
    """What `quant_method` of a parameter of scales may say."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


def build_initial_global_physical_to_logical_map(
    num_routed_experts: int, num_redundant_experts: int
) -> list[int]:
    """The expert of each physical slot: all in order, then copies from the first on."""
    if num_routed_experts < 1 or num_redundant_experts < 0:
        raise ConclaveValueError(
            f"num_redundant_experts: expected 0 or more of at least 1 expert, found "
            f"{num_redundant_experts} of {num_routed_experts}"
        )
    copies = [i % num_routed_experts for i in range(num_redundant_experts)]
    return [*range(num_routed_experts), *copies]


def expert_params_mapping(
    model: Any,
    names: tuple[str, str, str],
    num_experts: int,
    num_redundant_experts: int,
    prefix: str,
) -> list[Row]:
    """Rows for each physical expert and (w1, gate), (w2, down), (w3, up)."""
    gate, down, up = names
    logical = build_initial_global_physical_to_logical_map(num_experts, num_redundant_experts)
    adapted = model is not None and any(".base_layer." in n for n, _ in model.named_parameters())
    base = "base_layer." if adapted else ""
    shards = (("w1", gate, "w13_"), ("w2", down, "w2_"), ("w3", up, "w13_"))
    return [
        (f"{prefix}{base}{parameter}", f"experts.{logical[expert]}.{name}.{base}", expert, shard)
        for expert in range(num_experts + num_redundant_experts)
        for shard, name, parameter in shards
    ]


def fused_moe_make_expert_params_mapping(
    model: Any,
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
    routed_experts_prefix: str = "routed_experts",
) -> list[Row]:
    """The newer function: parameters lie under "experts.<routed_experts_prefix>."."""
    prefix = f"experts.{routed_experts_prefix}." if routed_experts_prefix else "experts."
    names = (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name)
    return expert_params_mapping(model, names, num_experts, num_redundant_experts, prefix)


def determine_expert_placement_strategy(
    expert_placement_strategy: str,
    moe_parallel_config: FusedMoEParallelConfig,
    num_expert_group: int | None,
    num_redundant_experts: int,
    enable_eplb: bool,
) -> str:
    """The strategy that can be had, with a warning where it is not the one asked for."""
    chosen = _choose_strategy(
        expert_placement_strategy,
        num_expert_group,
        num_redundant_experts,
        enable_eplb,
        moe_parallel_config.permits_round_robin,
    )
    if chosen != expert_placement_strategy:
        warnings.warn(
            f"expert_placement_strategy: {expert_placement_strategy} needs several groups of "
            "experts, no redundant ones, no balancer, and a transport that addresses experts by "
            f"position; using {chosen}",
            stacklevel=2,
        )
    return chosen


def ensure_round_robin_expert_routing_tables(
    global_num_experts: int,
    ep_size: int,
    ep_rank: int,
    local_num_experts: int,
    device: Any = None,
) -> tuple[Array, Array, Array]:
    """Tables global to physical [E], physical to global [E], local to global, int64."""
    tables = round_robin_routing_tables(global_num_experts, ep_size, ep_rank)
    placed = []
    for table in (*tables[:2], tables[2][:local_num_experts]):
        wide = table.long() if hasattr(table, "long") else table.astype("int64")
        placed.append(wide.to(device) if device is not None else wide)
    return placed[0], placed[1], placed[2]


def maybe_roundup_hidden_size(
    hidden_size: int,
    act_dtype: Any = None,
    moe_parallel_config: FusedMoEParallelConfig | None = None,
    is_lora_enabled: bool = False,
    model_type: str | None = None,
    is_mxfp4_quant: bool = False,
) -> int:
    """The hidden size as it is: packing pads inside, for every size and type."""
    del act_dtype, moe_parallel_config, is_lora_enabled, model_type, is_mxfp4_quant
    return hidden_size
