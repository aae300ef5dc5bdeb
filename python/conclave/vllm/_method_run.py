"""The layer of a `FusedMoE` whose experts a method packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conclave.spec import QuantSpec
from conclave.vllm._checks import Sizes, check_tokens
from conclave.vllm._method_schemes import MethodScheme
from conclave.vllm._packed import packed_layer
from conclave.vllm._packers import MethodExperts, RankExperts
from conclave.vllm.activation import MoEActivation
from conclave.vllm.experts import experts_spec, local_indices


def run_method_experts(
    layer: Any,
    scheme: MethodScheme,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum [T, H] of this rank's experts."""
    top_k = check_tokens(hidden, weights, ids)
    experts = _packed(layer, scheme, top_k, hidden.device)
    return experts.layer.forward(
        hidden, topk_ids=experts.ids_of(ids), topk_weights=weights, out=out
    )


def _packed(layer: Any, scheme: MethodScheme, top_k: int, device: torch.device) -> RankExperts:
    kind: MoEActivation = layer.activation
    has_bias = layer.has_bias
    spec = experts_spec(
        top_k,
        kind,
        layer.apply_router_weight_on_input,
        None,
        None,
        layer.swiglu_limit,
        QuantSpec(),
        "bfloat16",
        has_bias,
    )
    sizes = Sizes(layer.local_num_experts, layer.hidden_size, layer.intermediate_size_per_partition)

    def tensors() -> dict[str, torch.Tensor]:
        found = dict(scheme.tensors(layer, kind.is_gated, kind.is_interleaved))
        return {**found, **dict(_biases(layer, kind))} if has_bias else found

    packer = MethodExperts(spec, sizes, scheme.method, tensors, _name_of(device))
    places = {name: param.detach() for name, param in _own_parameters(layer)}
    for name in ("w13_weight", "w2_weight") if scheme.has_aids else ():
        aids = getattr(layer, name).aids
        places |= {f"{name}.{key}": tensor for key, tensor in aids.items()}
    made = packed_layer(places, (spec, sizes, scheme.method), packer.make, packer.reload)
    local_of = local_indices(layer.expert_map, layer.global_num_experts, sizes.experts)
    return RankExperts(made, local_of)


def _name_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"


def _own_parameters(layer: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in layer.named_parameters(recurse=False):
        if name.startswith(("w13_", "w2_")):
            yield name, param


def _biases(layer: Any, kind: MoEActivation) -> Iterator[tuple[str, torch.Tensor]]:
    """Of several tensor-parallel ranks the first adds that of w2."""
    joint = layer.w13_bias
    halves: list[torch.Tensor]
    names: tuple[str, ...]
    if not kind.is_gated:
        halves, names = [joint], ("up_proj",)
    elif kind.is_interleaved:
        halves, names = [joint[:, ::2], joint[:, 1::2]], ("gate_proj", "up_proj")
    else:
        halves, names = list(joint.chunk(2, 1)), ("gate_proj", "up_proj")
    down = layer.w2_bias if layer.tp_rank == 0 else torch.zeros_like(layer.w2_bias)
    separator = "_" if layer._scheme.is_stacked else "."
    for name, bias in zip((*names, "down_proj"), (*halves, down), strict=True):
        yield f"{name}{separator}bias", bias
