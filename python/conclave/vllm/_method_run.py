"""The layer of a `FusedMoE` whose experts a method packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conclave._devices import name_of
from conclave.spec import QuantSpec
from conclave.vllm._checks import Sizes, check_tokens
from conclave.vllm._method_schemes import PackedScheme
from conclave.vllm._packed import packed_layer
from conclave.vllm._packers import RankExperts
from conclave.vllm.activation import ActivationParameters, MoEActivation
from conclave.vllm.experts import experts_spec, local_indices


def run_method_experts(
    layer: Any,
    scheme: PackedScheme,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum [T, H] of this rank's experts."""
    top_k = check_tokens(hidden, weights, ids)
    experts = _packed(layer, scheme, top_k, hidden.device)
    return experts.run(hidden, ids, weights, out)


def _packed(layer: Any, scheme: PackedScheme, top_k: int, device: torch.device) -> RankExperts:
    kind: MoEActivation = layer.activation
    given: ActivationParameters = layer.activation_parameters
    spec = experts_spec(
        top_k,
        kind,
        layer.apply_router_weight_on_input,
        given.alpha,
        given.beta,
        given.limit,
        QuantSpec(),
        "bfloat16",
        layer.has_bias,
        given.linear_beta,
    )
    sizes = Sizes(layer.local_num_experts, layer.hidden_size, layer.intermediate_size_per_partition)

    packer = scheme.packer(layer, spec, sizes, name_of(device))
    places = {name: param.detach() for name, param in _own_parameters(layer)}
    places |= scheme.aids(layer)
    rule = (spec, sizes, scheme.rule(layer))
    made = packed_layer(places, rule, packer.make, packer.reload)
    local_of = local_indices(layer.expert_map, layer.global_num_experts, sizes.experts)
    return RankExperts(made, local_of)


def _own_parameters(layer: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in layer.named_parameters(recurse=False):
        if name.startswith(("w13_", "w2_")):
            yield name, param
