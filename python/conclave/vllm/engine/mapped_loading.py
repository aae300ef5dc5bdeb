"""Checkpoint tensors to any module's parameters, by rows of newest vLLM's mapping.

Rows of tensors of all experts come first, and have the half of w13 in the place of an expert:
(parameter, part of a tensor's name, physical expert or half, shard).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import dropwhile, takewhile
from typing import Any

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._registry import logger
from conclave.vllm.mapping import (
    FusedMoeWeightScaleSupported,
    Row,
    build_initial_global_physical_to_logical_map,
)

Tensors = Iterable[tuple[str, torch.Tensor]]

# A tensor of gate and up is called by the names of both.
_JOINED = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}
_OF_EXPERT = re.compile(r"experts\.(\d+)\.")


def published_mapping(
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str | None,
    num_experts: int,
    num_redundant_experts: int = 0,
    routed_experts_prefix: str = "routed_experts",
    lora_base_layer_prefix: str = "",
    lora_base_layer_prefix_on_param_name: str = "",
    include_fused: bool = False,
    is_gated: bool = True,
) -> list[Row]:
    """Rows for every physical expert and matrix; before them, with include_fused, those of tensors
    of all experts, and of gate and up in one. Names of gate and up that have no joined one are
    logged, and get no such rows.

    Args:
        lora_base_layer_prefix: "base_layer." where adapters lie beside a tensor's name;
            lora_base_layer_prefix_on_param_name: the same of a parameter's.
        is_gated: False: gate is the name of the only matrix before the activation.
    """
    if not ckpt_gate_proj_name or not ckpt_down_proj_name:
        raise ConclaveValueError("ckpt_gate_proj_name, ckpt_down_proj_name: expected names")
    below = f"{routed_experts_prefix}." if routed_experts_prefix else ""
    owner = f"experts.{lora_base_layer_prefix_on_param_name}{below}"
    logical = build_initial_global_physical_to_logical_map(num_experts, num_redundant_experts)
    joined = None
    rows: list[Row] = []
    if include_fused and is_gated:
        joined = _JOINED.get((ckpt_gate_proj_name, ckpt_up_proj_name or ""))
        if joined is None:
            logger.warning(
                "Unexpected gate/up projection names: %s, %s. Tensors of both are not mapped",
                ckpt_gate_proj_name,
                ckpt_up_proj_name,
            )
    if include_fused and (joined or not is_gated):
        stack = f"experts.{joined or ckpt_gate_proj_name}"
        halves = ("w1", "w3") if joined else ("w1",)
        rows += [(f"{owner}w13_weight", stack, half, shard) for half, shard in enumerate(halves)]
        rows.append((f"{owner}w2_weight", f"experts.{ckpt_down_proj_name}", 0, "w2"))
    matrices = [
        ("w13_", ckpt_gate_proj_name, "w1"),
        ("w2_", ckpt_down_proj_name, "w2"),
        ("w13_", ckpt_up_proj_name, "w3"),
    ]
    of_both = [("w13_", joined, "w1"), ("w13_", joined, "w3")]
    for group in (of_both, matrices):
        rows += [
            (owner + base, f"experts.{expert}.{matrix}.{lora_base_layer_prefix}", physical, shard)
            for physical, expert in enumerate(logical)
            for base, matrix, shard in group
            if matrix
        ]
    return rows


def load_by_mapping(layer: Any, weights: Tensors) -> Iterator[str]:
    """Loads (name, tensor) pairs, names relative to the layer, and yields the parameter's name for
    each tensor that a `weight_loader` took.

    Args:
        layer: has layer_name, get_expert_mapping, moe_config and parameters with a weight_loader;
            is_fused_checkpoint_transposed: tensors of all experts are stored [E, in, out].

    Raises:
        AttributeError: for a tensor whose parameter the layer lacks. Biases of experts that have
        none are left out: some exporters write them, of zeros.
    """
    rows = layer.get_expert_mapping(include_fused=True)
    numbers = [found and found.group(1) for found in (_OF_EXPERT.match(row[1]) for row in rows)]
    of_expert: dict[str, list[Row]] = {}
    for name, tensor in weights:
        full = f"{layer.layer_name}.{name}"
        number = name.partition(".")[0]
        stacked = tensor.ndim == 3 and number not in numbers
        if number in numbers and number not in of_expert:
            of_expert[number] = [
                row for row, own in zip(rows, numbers, strict=True) if own in (None, number)
            ]
        for parameter, part, expert, shard in _rows_of(full, of_expert.get(number, rows), stacked):
            mapped = full.replace(part, parameter).removeprefix(f"{layer.layer_name}.")
            param = getattr(layer, mapped, None)
            if param is None:
                if mapped.endswith(("w13_bias", "w2_bias")):
                    continue
                raise AttributeError(
                    f"{layer.layer_name} has no parameter {mapped!r}, to which {full!r} goes"
                )
            for index, one in _parts(layer, param, mapped, tensor, part, expert, shard, stacked):
                taken = param.weight_loader(
                    param=param,
                    loaded_weight=one,
                    weight_name=mapped,
                    shard_id=shard,
                    expert_id=index,
                    return_success=True,
                )
                if taken:
                    yield mapped


def _rows_of(full: str, rows: list[Row], stacked: bool) -> Iterable[Row]:
    """Rows that name a tensor. One of all experts takes the first rows in sequence alone, since
    rows behind them speak of single experts."""

    def names(row: Row) -> bool:
        return row[1] in full

    if not stacked:
        return filter(names, rows)
    return takewhile(names, dropwhile(lambda row: not names(row), rows))


def _parts(
    layer: Any,
    param: Any,
    mapped: str,
    tensor: torch.Tensor,
    part: str,
    expert: int,
    shard: str,
    stacked: bool,
) -> Iterator[tuple[int, torch.Tensor]]:
    """The expert and its tensor of one matrix, for each that a row speaks of."""
    if not stacked:
        joined = part.split(".")[2:3] and part.split(".")[2] in _JOINED.values()
        if joined and shard != "w2":
            tensor = tensor.chunk(2)[0 if shard == "w1" else 1]
        yield expert, tensor
        return
    turns = getattr(layer, "is_fused_checkpoint_transposed", False)
    block = FusedMoeWeightScaleSupported.BLOCK.value
    if turns and ("scale" not in mapped or getattr(param, "quant_method", None) == block):
        tensor = tensor.mT
    if shard != "w2" and layer.moe_config.is_act_and_mul:
        tensor = tensor.chunk(2, 1)[expert]
    yield from enumerate(tensor)
