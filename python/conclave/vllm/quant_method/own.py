"""The library's methods: parameters of plain values, and those of every scheme that it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError
from conclave.vllm._method_run import run_method_experts
from conclave.vllm._method_schemes import PackedScheme
from conclave.vllm.experts import fused_experts
from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.quant_builders import biased_moe_quant_config
from conclave.vllm.quant_method.base import FusedMoEMethodBase, set_weight_attrs
from conclave.vllm.scheme import Scheme


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """w13_weight [E, 2N, H] and w2_weight [E, H, N] of the layer's type, and biases."""

    @property
    def supports_eplb(self) -> bool:
        return True

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        rows = 2 * inner if self.moe.is_act_and_mul else inner
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, inner),
        }
        if self.moe.has_bias:
            shapes |= {"w13_bias": (num_experts, rows), "w2_bias": (num_experts, hidden_size)}
        for name, shape in shapes.items():
            values = torch.zeros(shape, dtype=params_dtype)
            param = torch.nn.Parameter(values, requires_grad=False)
            set_weight_attrs(param, extra_weight_attrs)
            layer.register_parameter(name, param)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        w1_bias, w2_bias = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        return biased_moe_quant_config(w1_bias, _of_first_rank(layer, w2_bias))

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum [T, H] by the library's kernels, in `out` if one is given. Shared
        experts are the layer's: None for both."""
        _refuse_shared(shared_experts, shared_experts_input)
        of_layer: Any = layer
        config, given = self.get_fused_moe_quant_config(layer), of_layer.activation_parameters
        if config is not None and (given.alpha, given.beta) != (None, None):
            config = dataclasses.replace(
                config,
                gemm1_alpha=_first(config.gemm1_alpha, given.alpha),
                gemm1_beta=_first(config.gemm1_beta, given.beta),
            )
        found: torch.Tensor = fused_experts(
            x,
            of_layer.w13_weight,
            of_layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=of_layer.activation,
            apply_router_weight_on_input=of_layer.apply_router_weight_on_input,
            global_num_experts=of_layer.global_num_experts,
            expert_map=of_layer.expert_map,
            quant_config=config,
            swiglu_limit=given.limit,
            linear_beta=given.linear_beta,
            out=out,
        )
        return found


class SchemeFusedMoEMethod(UnquantizedFusedMoEMethod):
    """The parameters of a configuration that the library reads."""

    def __init__(self, moe: FusedMoEConfig, scheme: Scheme | PackedScheme) -> None:
        super().__init__(moe)
        self.scheme = scheme

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """By the scheme, whose parameters know their sizes from the layer."""
        del sizes, attributes
        of_layer: Any = layer
        of_layer._scheme = self.scheme
        of_layer._create_weights()

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """None where a method of checkpoints packs the experts."""
        if isinstance(self.scheme, PackedScheme):
            return None
        return self.scheme.quant_config(
            layer, _of_first_rank(layer, getattr(layer, "w2_bias", None))
        )

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _refuse_shared(shared_experts, shared_experts_input)
        if isinstance(self.scheme, PackedScheme):
            return run_method_experts(layer, self.scheme, x, topk_weights, topk_ids, out)
        return super().apply(layer, x, topk_weights, topk_ids, out)


def _refuse_shared(*given: Any) -> None:
    if given != (None, None):
        raise ConclaveUnsupportedError(
            "shared_experts: the layer runs them, found some in a call of its method"
        )


def _first(own: float | None, of_layer: float | None) -> float | None:
    return of_layer if own is None else own


def _of_first_rank(layer: Any, bias: Any) -> Any:
    """Of several tensor-parallel ranks the first adds the bias of w2."""
    return bias if layer.tp_rank == 0 else None
