"""Routing of a `FusedMoE` by its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from conclave import _gradients
from conclave.errors import ConclaveValueError
from conclave.routing import (
    RoutingMethodType,
    fused_topk_bias,
    get_routing_method_type,
    grouped_topk,
)

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclasses.dataclass
class Routing:
    """The rule, in the order in which vLLM looks: router, zero experts, groups, a function, a bias
    or table, plain top-k."""

    top_k: int
    num_experts: int
    renormalize: bool = True
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    custom_routing_function: Callable[..., Any] | None = None
    router: Any = None
    scoring_func: str = "softmax"
    scale: float = 1.0
    bias: torch.Tensor | None = None
    zero_expert_type: str | None = None
    hash_indices_table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConclaveValueError(f"top_k: expected 1 to {self.num_experts}, found {self.top_k}")
        if self.scoring_func not in _SCORES:
            raise ConclaveValueError(
                f"scoring_func: expected one of {', '.join(_SCORES)}, found {self.scoring_func!r}"
            )
        if self.use_grouped_topk:
            self._check_groups()
        if self.zero_expert_type is not None:
            self._check_zero_experts()

    def _check_groups(self) -> None:
        if self.custom_routing_function is not None:
            raise ConclaveValueError("custom_routing_function: expected none with use_grouped_topk")
        for name in ("num_expert_group", "topk_group"):
            if getattr(self, name) is None:
                raise ConclaveValueError(f"{name}: use_grouped_topk needs it, found None")

    def _check_zero_experts(self) -> None:
        if self.zero_expert_type != "identity":
            raise ConclaveValueError(
                f"zero_expert_type: expected identity, found {self.zero_expert_type!r}"
            )
        if self.bias is None or self.bias.numel() < self.num_experts:
            raise ConclaveValueError(
                "e_score_correction_bias: zero experts need one for all experts, found "
                + ("None" if self.bias is None else f"{self.bias.numel()} numbers")
            )

    @property
    def method(self) -> RoutingMethodType:
        if self.router is not None:
            return getattr(self.router, "routing_method_type", RoutingMethodType.Custom)
        if self.custom_routing_function is not None:
            return RoutingMethodType.Custom
        return get_routing_method_type(
            self.scoring_func,
            self.top_k,
            self.renormalize,
            self.num_expert_group if self.use_grouped_topk else None,
            self.bias is not None,
            self.scale,
        )

    def select(
        self, hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] and ids [T, k]; ids of zero experts are num_experts and above."""
        if self.router is not None:
            return self._given(
                self.router.select_experts(hidden_states=hidden, router_logits=logits), "router"
            )
        if self.custom_routing_function is None:
            _gradients.refuse({"router_logits": logits, "e_score_correction_bias": self.bias})
        if self.use_grouped_topk:
            return grouped_topk(
                hidden,
                logits,
                self.top_k,
                self.renormalize,
                self.num_expert_group or 0,
                self.topk_group or 0,
                self.scoring_func,
                self.scale,
                self.bias,
            )
        if self.custom_routing_function is not None:
            found = self.custom_routing_function(
                hidden_states=hidden,
                gating_output=logits,
                topk=self.top_k,
                renormalize=self.renormalize,
            )
            return self._given(found, "custom_routing_function")
        if self.hash_indices_table is not None and input_ids is None:
            raise ConclaveValueError("input_ids: hash_indices_table needs them, found None")
        return fused_topk_bias(
            hidden,
            logits,
            self.bias,
            self.top_k,
            self.renormalize,
            self.scoring_func,
            None,
            input_ids,
            self.hash_indices_table,
            self.scale,
        )

    def _given(self, found: Any, argument: str) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = found[0], found[1]
        if weights.shape != ids.shape or ids.ndim != 2:
            raise ConclaveValueError(
                f"{argument}: expected weights and ids of one shape [T, k], found "
                f"{list(weights.shape)} and {list(ids.shape)}"
            )
        ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.int()
        return weights.float(), ids


def split_zero_experts(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with -1 for zero experts, and the weight [T, 1] float32 of each token's own row."""
    zero = ids >= num_experts
    share = torch.where(zero, weights, 0).sum(dim=1, keepdim=True, dtype=torch.float32)
    return torch.where(zero, -1, ids), share
