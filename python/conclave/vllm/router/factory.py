"""Which router a layer's arguments ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.routing import RoutingMethodType, get_routing_method_type
from conclave.vllm.eplb import EplbLayerState
from conclave.vllm.router.base import BaseRouter
from conclave.vllm.router.simulator import RoutingSimulatorRouter
from conclave.vllm.router.topk import (
    CustomRoutingRouter,
    FusedTopKBiasRouter,
    FusedTopKRouter,
    GroupedTopKRouter,
)
from conclave.vllm.router.zero_experts import ZeroExpertRouter

SIMULATION_VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


def create_fused_moe_router(
    top_k: int,
    global_num_experts: int,
    renormalize: bool = True,
    indices_type_getter: Callable[[], torch.dtype | None] | None = None,
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    scoring_func: str = "softmax",
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
    custom_routing_function: Callable[..., Any] | None = None,
    enable_eplb: bool | None = None,
    eplb_state: EplbLayerState | None = None,
    zero_expert_type: str | None = None,
    num_logical_experts: int | None = None,
    hash_indices_table: torch.Tensor | None = None,
    skip_padding: bool = False,
) -> BaseRouter:
    """The first of these that the arguments ask for: the simulator, if the environment has
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY; zero experts; groups; a function; a bias or a hash table;
    the best scores.

    Args:
        top_k: k. global_num_experts: of all ranks, replicas included.
        renormalize, scoring_func, routed_scaling_factor: of weights.
        indices_type_getter: says the type of ids.
        use_grouped_topk, num_expert_group, topk_group: groups of experts. One group is plain top-k.
        num_fused_shared_experts: of kernels for other GPUs; refused.
        e_score_correction_bias: added to scores for choosing.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize).
        enable_eplb: by default if there is an eplb_state.
        zero_expert_type, num_logical_experts: experts that return the token, and how many others.
        hash_indices_table: [vocab, k] ids of experts.
        skip_padding: of `GroupedTopKRouter`; other routers do not ask.

    Raises:
        Error: naming the argument.
    """
    if num_fused_shared_experts:
        raise ConclaveUnsupportedError(
            "num_fused_shared_experts: they belong to kernels for other GPUs; give shared_experts"
        )
    base: dict[str, Any] = {
        "eplb_state": eplb_state,
        "enable_eplb": enable_eplb,
        "indices_type_getter": indices_type_getter,
    }
    if strategy := os.environ.get(SIMULATION_VARIABLE, ""):
        return RoutingSimulatorRouter(
            top_k,
            global_num_experts,
            strategy_name=strategy,
            num_logical_experts=num_logical_experts,
            **base,
        )
    score: dict[str, Any] = {
        "renormalize": renormalize,
        "scoring_func": scoring_func,
        "routed_scaling_factor": routed_scaling_factor,
    }

    def rule(**base: Any) -> BaseRouter:
        if use_grouped_topk:
            _check_groups(num_expert_group, topk_group, custom_routing_function)
            if not _is_plain(num_expert_group, topk_group, score, e_score_correction_bias):
                return GroupedTopKRouter(
                    top_k,
                    global_num_experts,
                    num_expert_group or 0,
                    topk_group or 0,
                    e_score_correction_bias=e_score_correction_bias,
                    skip_padding=skip_padding,
                    **score,
                    **base,
                )
        if custom_routing_function is not None:
            return CustomRoutingRouter(
                top_k, global_num_experts, custom_routing_function, renormalize, **base
            )
        if e_score_correction_bias is None and hash_indices_table is None:
            return FusedTopKRouter(top_k, global_num_experts, **score, **base)
        return FusedTopKBiasRouter(
            top_k,
            global_num_experts,
            e_score_correction_bias,
            hash_indices_table=hash_indices_table,
            **score,
            **base,
        )

    if zero_expert_type is None:
        return rule(**base)
    if num_logical_experts is None:
        raise ConclaveValueError("num_logical_experts: zero_expert_type needs it, found None")
    return ZeroExpertRouter(
        top_k,
        global_num_experts,
        e_score_correction_bias,
        num_logical_experts,
        zero_expert_type,
        rule=rule(),
        **score,
        **base,
    )


def _check_groups(groups: int | None, kept: int | None, function: Any) -> None:
    if function is not None:
        raise ConclaveValueError("custom_routing_function: expected none with use_grouped_topk")
    for name, value in (("num_expert_group", groups), ("topk_group", kept)):
        if value is None:
            raise ConclaveValueError(f"{name}: use_grouped_topk needs it, found None")


def _is_plain(
    groups: int | None, kept: int | None, score: dict[str, Any], bias: torch.Tensor | None
) -> bool:
    """Whether one group of experts needs no router of groups: where the method has no name of its
    own, and where nothing but the best scores are asked for."""
    if groups != 1 or kept != 1:
        return False
    scale = score["routed_scaling_factor"]
    method = get_routing_method_type(
        score["scoring_func"], 0, score["renormalize"], groups, bias is not None, scale
    )
    return method is not RoutingMethodType.DeepSeekV3 and (bias is not None or scale == 1.0)
