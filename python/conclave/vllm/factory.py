"""The newer constructor of a layer of experts, which sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conclave.vllm.activation import MoEActivation
from conclave.vllm.layer import FusedMoE
from conclave.vllm.mapping import Row
from conclave.vllm.parallel import FusedMoEParallelConfig


def FusedMoEFactory(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    params_dtype: torch.dtype | None = None,
    renormalize: bool = True,
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    quant_config: Any = None,
    tp_size: int | None = None,
    dp_size: int | None = None,
    pcp_size: int | None = None,
    prefix: str = "",
    custom_routing_function: Callable[..., Any] | None = None,
    router: Any = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    swiglu_limit: float | None = None,
    e_score_correction_bias: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    activation: str | MoEActivation = "silu",
    enable_eplb: bool = False,
    num_redundant_experts: int = 0,
    has_bias: bool = False,
    is_sequence_parallel: bool = False,
    expert_mapping: list[Row] | None = None,
    n_shared_experts: int | None = None,
    router_logits_dtype: torch.dtype | None = None,
    gate: torch.nn.Module | None = None,
    shared_experts: torch.nn.Module | None = None,
    shared_expert_gate: torch.nn.Module | None = None,
    routed_input_transform: torch.nn.Module | None = None,
    routed_output_transform: torch.nn.Module | None = None,
    apply_routed_scale_to_output: bool = False,
    zero_expert_type: str | None = None,
    hash_indices_table: torch.Tensor | None = None,
    runner_cls: Any = None,
    runner_args: dict[str, Any] | None = None,
    routed_experts_cls: Any = None,
    routed_experts_args: dict[str, Any] | None = None,
    *,
    moe_parallel_config: FusedMoEParallelConfig | None = None,
    expert_placement_strategy: str = "linear",
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    activation_situ_beta: float | None = None,
    activation_situ_linear_beta: float | None = None,
    shared_experts_stream_token_threshold: int | None = None,
    tp_group: Any = None,
    dp_group: Any = None,
    pcp_group: Any = None,
    ep_group: Any = None,
) -> FusedMoE:
    """A `FusedMoE` by the parameters, and in the order, of vLLM's newer factory.

    There is no reduce_results: `forward` always sums over the ranks of the split, routed and shared
    experts. Arguments mean what they mean in `FusedMoE`, which is layer and runner in one.
    """
    given = dict(locals())
    return FusedMoE(**given, reduce_results=True)
