"""What vLLM's layers call their runner: a view of the layer, which runs itself."""

from __future__ import annotations

from typing import Any

import torch

from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.quant_method.base import FusedMoEMethodBase


class MoERunner:
    """The execution interface of a layer. What it has is the layer's, also after a change of it.

    Args:
        layer: a `FusedMoE`.
        enable_dbo: of vLLM's; always False. Chunks of a call overlap by `chunk_order` of a
            `conclave.Layer`.
    """

    def __init__(self, layer: Any, enable_dbo: bool = False) -> None:
        self.layer = layer
        self.enable_dbo = enable_dbo

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """The layer's forward."""
        return self.layer(hidden_states, router_logits, input_ids, **more)

    __call__ = forward

    @property
    def layer_name(self) -> str:
        found: str = self.layer.layer_name
        return found

    @property
    def moe_config(self) -> FusedMoEConfig:
        found: FusedMoEConfig = self.layer.moe_config
        return found

    @property
    def router(self) -> Any:
        return self.layer.router

    @property
    def routed_experts(self) -> Any:
        return self.layer.routed_experts

    @property
    def quant_method(self) -> FusedMoEMethodBase:
        found: FusedMoEMethodBase = self.layer.quant_method
        return found

    @property
    def gate(self) -> torch.nn.Module | None:
        found: torch.nn.Module | None = self.layer.gate
        return found

    @property
    def shared_experts(self) -> torch.nn.Module | None:
        found: torch.nn.Module | None = self.layer.shared_experts
        return found

    @property
    def is_internal_router(self) -> bool:
        return self.gate is not None

    @property
    def use_overlapped(self) -> bool:
        return self.shared_experts is not None

    @property
    def reduce_results(self) -> bool:
        found: bool = self.layer.reduce_results
        return found

    def must_reduce_shared_expert_outputs(self) -> bool:
        """As of the layer."""
        found: bool = self.layer.must_reduce_shared_expert_outputs()
        return found

    def maybe_all_reduce_tensor_model_parallel(
        self, final_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """As of the layer."""
        found: torch.Tensor = self.layer.maybe_all_reduce_tensor_model_parallel(final_hidden_states)
        return found
