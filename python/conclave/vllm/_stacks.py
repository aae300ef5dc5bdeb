"""Tensors of all experts in one, and of gate and up in one, taken apart.

A checkpoint may have `experts.gate_up_proj` [E, 2N, H] and `experts.down_proj` [E, H, N], such
tensors of one expert (`experts.3.gate_up_proj.weight`), or stacks of gate, up and down apart, with
biases and scales beside them. Each becomes the tensors that `weight_loader` takes one by one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._modules import members_of
from conclave.vllm.mapping import FusedMoeWeightScaleSupported

# By the names of gate and up, what a tensor of both is called; the first ones always.
_FUSED = ("gate_up_proj", "w13")
_PLAIN = ("gate_proj", "down_proj", "up_proj")
# gpt-oss's words for codes and their scales.
_OTHER_WORDS = {"blocks": "weight", "scales": "weight_scale"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One expert's tensor of a matrix, for `weight_loader`."""

    parameter: str
    shard: str  # w1, w2, w3, or w13 for rows of gate and up in turn
    expert: int  # physical
    tensor: torch.Tensor


def logical_of(layer: Any, physical: int) -> int:
    """The expert whose weights a physical one has when a layer is loaded."""
    experts: int = layer.logical_num_experts
    return physical % experts


def own_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """Experts of this rank: their number among the physical ones, and in the parameters."""
    for expert in range(layer.global_num_experts):
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local >= 0:
            yield expert, local


def experts_of_stack(layer: Any, rows: int, name: str) -> list[tuple[int, int]]:
    """Where in a stack of this many experts those of this rank lie: (row, local index).

    A stack has all experts of the model, all physical ones, or those of this rank.
    """
    own = list(own_experts(layer))
    if rows == layer.global_num_experts:
        return own
    if rows == layer.logical_num_experts:
        return [(logical_of(layer, expert), local) for expert, local in own]
    if rows == layer.local_num_experts:
        return [(local, local) for _, local in own]
    raise ConclaveValueError(
        f"{name}: expected a tensor of {layer.logical_num_experts} experts, or of this rank's "
        f"{layer.local_num_experts}, found {rows}"
    )


def is_stack(layer: Any, param: Any, source: Any) -> bool:
    """Whether a tensor has all experts, by its axes: one more than an expert's part."""
    if getattr(source, "ndim", 0) != param.ndim or param.ndim < 2:
        return False
    counts = (layer.logical_num_experts, layer.global_num_experts, layer.local_num_experts)
    return int(source.shape[0]) in counts and not getattr(param, "of_all_ranks", False)


def fused_parts(layer: Any, name: str, source: torch.Tensor) -> list[Part] | None:
    """The parts of a tensor whose name is not that of one expert's matrix; None for other names."""
    block, _, own_name = name.rpartition("experts.")
    found = _names_of(layer).fullmatch(own_name)
    if found is None or not (block == "" or block.endswith(".")):  # shared_experts. is another's
        return None
    number, matrix, suffix = found.groups()
    if number is not None and matrix not in _FUSED:
        return None
    base = "w2" if matrix == _members(layer)[1] else "w13"
    parameter, param = _parameter(layer, base, suffix or "weight", name)
    if hasattr(param, "blocks"):
        raise ConclaveUnsupportedError(
            f"weights: {name} has gate and up, or all experts, in one; blocks of GGUF come by "
            "their own names"
        )
    shards = _shards(layer, matrix, base)
    if number is None:
        rows = experts_of_stack(layer, int(source.shape[0]), name)
        whole = {local: source[row] for row, local in rows}
        experts = [(expert, whole[local]) for expert, local in own_experts(layer)]
    else:
        experts = [
            (expert, source)
            for expert in range(layer.global_num_experts)
            if logical_of(layer, expert) == int(number)
        ]
        if not experts:
            raise ConclaveValueError(
                f"weights: {name} is of expert {number}, the layer has "
                f"{layer.logical_num_experts} experts"
            )
    return [
        Part(parameter, shard, expert, tensor)
        for expert, whole_tensor in experts
        for shard, tensor in _split(layer, param, parameter, whole_tensor, shards, name)
    ]


def _members(layer: Any) -> tuple[str, str, str | None]:
    """Names of gate, down and up in the layer's checkpoints."""
    found = members_of(layer.expert_mapping)
    gate, down, up = (*found, None, None, None)[:3]
    return gate or _PLAIN[0], down or _PLAIN[1], up if found else _PLAIN[2]


def _names_of(layer: Any) -> re.Pattern[str]:
    gated = layer.activation.is_gated
    known = {name for name in (*_members(layer), *(_FUSED if gated else ())) if name}
    names = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    return re.compile(rf"(?:(\d+)\.)?({names})(?:[._](\w+))?")


def _parameter(layer: Any, base: str, suffix: str, name: str) -> tuple[str, Any]:
    tried = [f"{base}_{suffix}", f"{base}_{_OTHER_WORDS.get(suffix, suffix)}"]
    for parameter in tried:
        if (param := getattr(layer, parameter, None)) is not None:
            return parameter, param
    raise ConclaveValueError(
        f"weights: {name} goes to {tried[0]}, which {layer.layer_name!r} does not have"
    )


def _shards(layer: Any, matrix: str, base: str) -> tuple[str, ...]:
    gate, _, up = _members(layer)
    if base == "w2":
        return ("w2",)
    if matrix in (gate, up) and matrix not in _FUSED:
        return ("w3",) if matrix == up and matrix != gate else ("w1",)
    if not layer.activation.is_gated:
        return ("w1",)
    return ("w13",) if layer.activation.is_interleaved else ("w1", "w3")


def _split(
    layer: Any, param: Any, parameter: str, source: torch.Tensor, shards: tuple[str, ...], name: str
) -> list[tuple[str, torch.Tensor]]:
    scaled = "scale" in parameter or "zero" in parameter
    by_block = getattr(param, "quant_method", None) == FusedMoeWeightScaleSupported.BLOCK.value
    if layer.is_fused_checkpoint_transposed and source.ndim == 2 and (by_block or not scaled):
        source = source.transpose(0, 1)
    if len(shards) == 1:
        return [(shards[0], source)]
    if source.numel() == 1:
        return [(shard, source) for shard in shards]
    axis = 1 if getattr(param, "is_transposed", False) and not getattr(param, "turns", False) else 0
    if axis >= source.ndim or source.shape[axis] % 2 != 0:
        raise ConclaveValueError(
            f"weights: {name} expected rows of gate and as many of up, found shape "
            f"{list(source.shape)}"
        )
    return list(zip(shards, source.chunk(2, axis), strict=True))
