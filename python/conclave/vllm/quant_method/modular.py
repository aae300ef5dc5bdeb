"""A method out of modular pieces, which takes the place of the one that made the parameters."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError
from conclave.vllm.modular_kernel import FusedMoEModularKernel
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.quant_method.base import FusedMoEMethodBase


class FusedMoEModularMethod(FusedMoEMethodBase):
    """Computes by a `FusedMoEModularKernel` with the parameters of another method."""

    def __init__(
        self,
        old_quant_method: FusedMoEMethodBase,
        experts: FusedMoEModularKernel,
        inplace: bool = False,
    ) -> None:
        super().__init__(old_quant_method.moe)
        self.moe_quant_config = old_quant_method.moe_quant_config
        self.old_quant_method = old_quant_method
        self.fused_experts = experts
        self.inplace = inplace

    @staticmethod
    def make(
        moe_layer: torch.nn.Module,
        old_quant_method: FusedMoEMethodBase,
        prepare_finalize: Any,
        shared_experts: torch.nn.Module | None = None,
        inplace: bool = False,
    ) -> FusedMoEModularMethod:
        """With the experts that old_quant_method selects. shared_experts: the layer runs them."""
        del shared_experts
        experts = old_quant_method.select_gemm_impl(prepare_finalize, moe_layer)
        kernel = FusedMoEModularKernel(prepare_finalize, experts)
        return FusedMoEModularMethod(old_quant_method, kernel, inplace)

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        found: torch.dtype | None = self.fused_experts.prepare_finalize.topk_indices_dtype()
        return found

    @property
    def supports_eplb(self) -> bool:
        return self.old_quant_method.supports_eplb

    @property
    def supports_internal_mk(self) -> bool:
        return True

    def create_weights(self, *sizes: Any, **attributes: Any) -> None:
        raise ConclaveUnsupportedError("create_weights: the method before this one made them")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.old_quant_method.process_weights_after_loading(layer)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        del layer
        return self.moe_quant_config

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum [T, H]."""
        of_layer: Any = layer
        takes_map = self.fused_experts.fused_experts.supports_expert_map()
        found: torch.Tensor = self.fused_experts(
            x,
            of_layer.w13_weight,
            of_layer.w2_weight,
            topk_weights,
            topk_ids,
            inplace=self.inplace,
            activation=of_layer.activation.value,
            global_num_experts=of_layer.global_num_experts,
            expert_map=of_layer.expert_map if takes_map else None,
            apply_router_weight_on_input=of_layer.apply_router_weight_on_input,
        )
        return found
