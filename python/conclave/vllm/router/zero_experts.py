"""Zero experts: choices that return the token itself."""

from __future__ import annotations

import threading
from typing import Any

import torch

from conclave.errors import ConclaveValueError
from conclave.routing import RoutingMethodType
from conclave.vllm.router.base import BaseRouter, Pair
from conclave.vllm.router.topk import FusedTopKBiasRouter


class ZeroExpertRouter(BaseRouter):
    """Routes over experts and zero experts, whose ids are num_logical_experts and above.

    `select_experts` returns -1 with weight 0 for them, and keeps what they contribute in
    `zero_expert_output`.

    Args:
        e_score_correction_bias: one for every expert, zero experts included.
        num_logical_experts: that are no zero experts.
        zero_expert_type: "identity".
        rule: the router that chooses; by default by the best scores plus the bias.
    """

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        e_score_correction_bias: torch.Tensor | None,
        num_logical_experts: int,
        zero_expert_type: str = "identity",
        scoring_func: str = "softmax",
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        *,
        rule: BaseRouter | None = None,
        **of_base: Any,
    ) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        if zero_expert_type != "identity":
            raise ConclaveValueError(
                f"zero_expert_type: expected identity, found {zero_expert_type!r}"
            )
        bias = e_score_correction_bias
        if bias is None or bias.numel() < num_logical_experts:
            raise ConclaveValueError(
                "e_score_correction_bias: zero experts need one for all experts, found "
                + ("None" if bias is None else f"{bias.numel()} numbers")
            )
        self.e_score_correction_bias = bias
        self.num_logical_experts = num_logical_experts
        self.zero_expert_type = zero_expert_type
        self.scoring_func = scoring_func
        self.renormalize = renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.rule = rule or FusedTopKBiasRouter(
            top_k,
            global_num_experts,
            bias,
            renormalize,
            routed_scaling_factor,
            scoring_func=scoring_func,
        )
        self._kept = threading.local()

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return RoutingMethodType.Unspecified

    @property
    def zero_expert_output(self) -> torch.Tensor | None:
        """[T, H] of the tokens' type, these times the weights of their zero experts, of this
        thread's last `select_experts`. It is given once; None before and afterwards."""
        found = getattr(self._kept, "output", None)
        self._kept.output = None
        return found

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        return self.rule._compute_routing(
            hidden_states, router_logits, indices_type, input_ids=input_ids
        )

    def _resolve(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Pair:
        weights, ids, share = split_zero_experts(weights, ids, self.num_logical_experts)
        self._kept.output = (hidden.float() * share).to(hidden.dtype)
        return weights, ids

    def __getstate__(self) -> dict[str, Any]:
        """All but what a thread keeps, which belongs to a call of this object."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept = threading.local()


def split_zero_experts(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and ids with 0 and -1 for zero experts, and the weight [T, 1] float32 of each token's
    own row."""
    zero = ids >= num_experts
    share = torch.where(zero, weights, 0).sum(dim=1, keepdim=True, dtype=torch.float32)
    return torch.where(zero, 0.0, weights), torch.where(zero, -1, ids), share
