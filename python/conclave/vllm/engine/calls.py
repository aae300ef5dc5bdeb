"""Calls of this package with the arguments in the order of newest vLLM."""

from __future__ import annotations

from typing import Any

import torch

from conclave import permute, routing
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._activate import ApplyMoEActivationConfig, activate
from conclave.vllm.activation import MoEActivation, parse_activation
from conclave.vllm.experts import fused_experts as run_experts
from conclave.vllm.mapping import Row, expert_params_mapping


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """`conclave.vllm.fused_experts`; where an activation stands in the place of inplace, options
    are in newest vLLM's order: activation, apply_router_weight_on_input, global_num_experts,
    expert_map, quant_config."""
    if options and not isinstance(options[0], bool):
        options = (False, *options)
    return run_experts(hidden_states, w1, w2, topk_weights, topk_ids, *options, **named)


def fused_topk_bias(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    scoring_func: str,
    e_score_correction_bias: torch.Tensor | None,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    input_tokens: torch.Tensor | None = None,
    hash_indices_table: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    bias_vl: torch.Tensor | None = None,
    image_sentinel_lo: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`conclave.fused_topk_bias`."""
    if bias_vl is not None or image_sentinel_lo:
        raise ConclaveUnsupportedError("bias_vl: biases of image tokens do not run")
    return routing.fused_topk_bias(
        hidden_states,
        gating_output,
        e_score_correction_bias,
        topk,
        renormalize,
        scoring_func,
        indices_type,
        input_tokens,
        hash_indices_table,
        routed_scaling_factor,
    )


def fused_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: torch.Tensor,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`conclave.grouped_topk`, with the bias before the groups."""
    return routing.grouped_topk(
        hidden_states,
        gating_output,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        scoring_func,
        routed_scaling_factor,
        e_score_correction_bias,
    )


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> Any:
    """`conclave.moe_align_block_size`; with return_scatter_idx also [T k, 1] int32, each slot's own
    number where its expert is here, else -1."""
    if return_scatter_idx and expert_map is not None and not ignore_invalid_experts:
        raise ConclaveValueError(
            "return_scatter_idx: expected ignore_invalid_experts=True beside an expert_map"
        )
    found = permute.moe_align_block_size(
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )
    if not return_scatter_idx:
        return found
    ids = topk_ids.flatten().long()
    held = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        held = held & (expert_map.to(ids.device)[torch.where(held, ids, 0)] >= 0)
    slots = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    return (*found, torch.where(held, slots, -1).unsqueeze(1))


def moe_permute(
    hidden_states: torch.Tensor,
    a1q_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: torch.Tensor | None = None,
    permuted_hidden_states: torch.Tensor | None = None,
    scratch: Any = None,
) -> Any:
    """`conclave.moe_permute`, which needs no scratch memory. The rows of zeros, of slots without a
    local expert, are numbered in the order of their experts."""
    del scratch
    rows, scales, first, inverse, index = permute.moe_permute(
        hidden_states,
        a1q_scale,
        topk_ids,
        n_expert,
        n_local_expert,
        expert_map,
        permuted_hidden_states,
    )
    if expert_map is not None:
        ids, place = topk_ids.flatten().long(), inverse.long()
        outside = torch.where(ids >= 0, ids, n_expert)
        order = torch.where(place < first[-1], place - place.numel(), outside)
        numbers = torch.arange(place.numel(), dtype=inverse.dtype, device=inverse.device)
        inverse[order.argsort(stable=True)] = numbers
    return rows, scales, first, inverse, index


def moe_permute_unpermute_supported() -> bool:
    """Always: permuting runs on every device."""
    return True


def apply_moe_activation(
    activation: MoEActivation | str,
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation_config: ApplyMoEActivationConfig | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    valid_token_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the activation of input to output and returns it. Rows that do not count, by ids or
    counts, are computed too."""
    del topk_ids, expert_map, valid_token_counts
    kind = parse_activation(activation)
    activate(kind, output, input, (activation_config or ApplyMoEActivationConfig()).spec(kind))
    return output


def activation_without_mul(activation: MoEActivation | str) -> Any:
    """The form without a gate: a name of a name, a member of a member."""
    kind = parse_activation(activation).without_mul()
    return kind.value if isinstance(activation, str) else kind


def fused_moe_make_expert_params_mapping(
    model: Any,
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str | None,
    num_experts: int,
    num_redundant_experts: int = 0,
    routed_experts_prefix: str = "routed_experts",
) -> list[Row]:
    """`conclave.vllm.fused_moe_make_expert_params_mapping`; without an up projection two rows an
    expert."""
    if not ckpt_gate_proj_name or not ckpt_down_proj_name:
        raise ConclaveValueError("ckpt_gate_proj_name, ckpt_down_proj_name: expected names")
    prefix = f"experts.{routed_experts_prefix}." if routed_experts_prefix else "experts."
    names = (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name or "")
    rows = expert_params_mapping(model, names, num_experts, num_redundant_experts, prefix)
    return rows if ckpt_up_proj_name else [row for row in rows if row[3] != "w3"]


def fuses_no_shared_experts(*_: Any, **__: Any) -> bool:
    """False: shared experts are modules beside the routed ones, as vLLM has them by default."""
    return False
