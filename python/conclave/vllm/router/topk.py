"""Routers of the published rules, and of a function of the caller's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.routing import (
    RoutingMethodType,
    fused_topk_bias,
    get_routing_method_type,
    grouped_topk,
)
from conclave.vllm.engine.context import padding_of_forward
from conclave.vllm.router.base import (
    BaseRouter,
    Pair,
    checked_score,
    refuse_gradients,
    without_padding,
)


class FusedTopKBiasRouter(BaseRouter):
    """The k best scores plus a bias that chooses and never weighs, or the ids of a hash table."""

    _gives_checked = True

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        e_score_correction_bias: torch.Tensor | None = None,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        *,
        scoring_func: str = "sigmoid",
        hash_indices_table: torch.Tensor | None = None,
        **of_base: Any,
    ) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        self.e_score_correction_bias = e_score_correction_bias
        self.renormalize = renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.scoring_func = checked_score(scoring_func)
        self.hash_indices_table = hash_indices_table
        if hash_indices_table is not None:
            _check_table(hash_indices_table, top_k)

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return get_routing_method_type(
            self.scoring_func,
            self.top_k,
            self.renormalize,
            None,
            self.e_score_correction_bias is not None,
            self.routed_scaling_factor,
        )

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        refuse_gradients(router_logits, self.e_score_correction_bias)
        if self.hash_indices_table is not None and input_ids is None:
            raise ConclaveValueError("input_ids: hash_indices_table needs them, found None")
        return fused_topk_bias(
            hidden_states,
            router_logits,
            self.e_score_correction_bias,
            self.top_k,
            self.renormalize,
            self.scoring_func,
            None,
            input_ids,
            self.hash_indices_table,
            self.routed_scaling_factor,
        )


class FusedTopKRouter(FusedTopKBiasRouter):
    """The k best scores. The scale is applied here too."""

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        *,
        routed_scaling_factor: float = 1.0,
        **of_base: Any,
    ) -> None:
        super().__init__(
            top_k,
            global_num_experts,
            None,
            renormalize,
            routed_scaling_factor,
            scoring_func=scoring_func,
            **of_base,
        )


class GroupedTopKRouter(BaseRouter):
    """The k best experts out of the best groups of experts (DeepSeek).

    With skip_padding tokens that the forward context's is_padding [T] names choose nothing: id -1,
    weight 0.
    """

    _gives_checked = True

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        num_expert_group: int,
        topk_group: int,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        skip_padding: bool = False,
        **of_base: Any,
    ) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        self.skip_padding = skip_padding
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.renormalize = renormalize
        self.scoring_func = checked_score(scoring_func)
        self.routed_scaling_factor = routed_scaling_factor
        self.e_score_correction_bias = e_score_correction_bias

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return get_routing_method_type(
            self.scoring_func,
            self.top_k,
            self.renormalize,
            self.num_expert_group,
            self.e_score_correction_bias is not None,
            self.routed_scaling_factor,
        )

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        refuse_gradients(router_logits, self.e_score_correction_bias)
        weights, ids = grouped_topk(
            hidden_states,
            router_logits,
            self.top_k,
            self.renormalize,
            self.num_expert_group,
            self.topk_group,
            self.scoring_func,
            self.routed_scaling_factor,
            self.e_score_correction_bias,
        )
        padding = padding_of_forward() if self.skip_padding else None
        if padding is None:
            return weights, ids
        return without_padding(weights, ids, ~padding[: len(ids)])


class CustomRoutingRouter(BaseRouter):
    """A function (hidden_states, gating_output, topk, renormalize) that returns weights and ids.

    A function that has an attribute routing_method_type says by it what its rule amounts to.
    """

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        custom_routing_function: Callable[..., Any],
        renormalize: bool = True,
        **of_base: Any,
    ) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        if not callable(custom_routing_function):
            raise ConclaveTypeError(
                "custom_routing_function: expected a function, found "
                f"{type(custom_routing_function).__name__}"
            )
        self.custom_routing_function = custom_routing_function
        self.renormalize = renormalize

    @property
    def routing_method_type(self) -> RoutingMethodType:
        found = getattr(self.custom_routing_function, "routing_method_type", None)
        return RoutingMethodType.Custom if found is None else RoutingMethodType(found)

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        found: Pair = self.custom_routing_function(
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
        )
        return found


class ObjectRouter(BaseRouter):
    """Any object that has select_experts(hidden_states=, router_logits=); it is told the type of
    ids and the token ids where its parameters have these names."""

    def __init__(self, top_k: int, global_num_experts: int, inner: Any, **of_base: Any) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        select = getattr(inner, "select_experts", None)
        if not callable(select):
            raise ConclaveTypeError(
                "router: expected a FusedMoERouter, or an object with select_experts, found "
                f"{type(inner).__name__}"
            )
        self.inner = inner
        self._taken = _names_of(select)

    @property
    def routing_method_type(self) -> RoutingMethodType:
        found = getattr(self.inner, "routing_method_type", None)
        return RoutingMethodType.Custom if found is None else RoutingMethodType(found)

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        more = {"topk_indices_dtype": indices_type, "input_ids": input_ids}
        more = {name: value for name, value in more.items() if name in self._taken}
        found: Pair = self.inner.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, **more
        )
        return found


def _check_table(table: Any, top_k: int) -> None:
    shape = tuple(getattr(table, "shape", ()))
    if len(shape) != 2 or shape[0] < 1 or shape[1] != top_k:
        raise ConclaveValueError(
            f"hash_indices_table: expected shape [vocab, {top_k}], found {list(shape)}"
        )
    if table.dtype not in (torch.int32, torch.int64):
        raise ConclaveTypeError(f"hash_indices_table: expected int32 or int64, found {table.dtype}")


def _names_of(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins say nothing
        return frozenset()
