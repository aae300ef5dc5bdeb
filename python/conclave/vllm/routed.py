"""How a layer of experts chooses: its router, and what a router says of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.routing import RoutingMethodType
from conclave.vllm.ranked import RankedExperts
from conclave.vllm.router.base import BaseRouter, CaptureFn
from conclave.vllm.router.topk import (
    FusedTopKBiasRouter,
    FusedTopKRouter,
    GroupedTopKRouter,
    ObjectRouter,
)
from conclave.vllm.router.zero_experts import ZeroExpertRouter, split_zero_experts

# Routers whose logits are those of experts, and of nothing else.
_OF_EXPERTS = (FusedTopKBiasRouter, FusedTopKRouter, GroupedTopKRouter)

# Layers whose EPLB state routers have, so that no second layer takes the same one unseen.
_owners: weakref.WeakKeyDictionary[BaseRouter, Callable[[], RoutedLayer | None]] = (
    weakref.WeakKeyDictionary()
)


class RoutedLayer(RankedExperts):
    """Experts of one rank with the router that chooses among them."""

    logical_num_experts: int
    _router: BaseRouter
    _of_router: dict[str, torch.Tensor | None]

    def _take_router(self, router: Any) -> None:
        """A router of the caller's, which gets this layer's EPLB state, or brings its own."""
        if not isinstance(router, BaseRouter) or _selects_itself(router):
            # Its ids are of experts, unless it says that it chooses replicas itself.
            ours = self.enable_eplb and not getattr(router, "enable_eplb", False)
            self._router = ObjectRouter(
                self.top_k,
                self.global_num_experts,
                router,
                eplb_state=self.eplb_state if ours else None,
            )
            return
        if router.top_k != self.top_k:
            raise ConclaveValueError(
                f"router: expected one of top_k {self.top_k}, found {router.top_k}"
            )
        self._router = router
        if not self.enable_eplb:
            return
        if router.eplb_state is None:
            router.eplb_state, router.enable_eplb = self.eplb_state, True
        else:
            owner = _owners.get(router, lambda: None)()
            if owner is not None and owner is not self:
                raise ConclaveValueError(
                    f"router: it has the EPLB state of the layer {owner.layer_name!r}; make a "
                    "router for each layer"
                )
            self.eplb_state = router.eplb_state
        _owners[router] = weakref.ref(self)

    @property
    def router(self) -> Any:
        """The router: a `BaseRouter`, or the object that was given."""
        found = self._router
        return found.inner if isinstance(found, ObjectRouter) else found

    @property
    def e_score_correction_bias(self) -> torch.Tensor | None:
        """As it was given; its owner is who gave it."""
        return self._of_router["bias"]

    @property
    def hash_indices_table(self) -> torch.Tensor | None:
        """As it was given."""
        return self._of_router["table"]

    @property
    def _has_zero_experts(self) -> bool:
        return isinstance(self._router, ZeroExpertRouter)

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """The routing method that the router says."""
        return self._router.routing_method_type

    def set_capture_fn(self, capture_fn: CaptureFn | None) -> None:
        """Calls capture_fn with the ids [T, k] of every forward, before replicas are chosen: of
        experts, num_experts and above for zero experts, -1 for padding. None: no longer."""
        self._router.set_capture_fn(capture_fn)

    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        topk_indices_dtype: torch.dtype | None = None,
        *,
        num_tokens: int | torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] float32 and ids [T, k] of topk_indices_dtype: of physical experts with
        EPLB, else of experts; -1 for zero experts and padding. Arguments as of `forward`."""
        weights, ids, _ = self._select(
            hidden_states, router_logits, input_ids, topk_indices_dtype, num_tokens, padding_mask
        )
        return weights, ids

    def _select(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        input_ids: torch.Tensor | None,
        indices: torch.dtype | None,
        num_tokens: int | torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Weights, ids, and with zero experts the weight [T, 1] of each token's own row."""
        router, share = self._router, None
        for name, rows in (("hidden_states", hidden), ("router_logits", logits)):
            if not isinstance(rows, torch.Tensor):
                raise ConclaveTypeError(f"{name}: expected a tensor, found {type(rows).__name__}")
        self._check_logits(router, logits)
        weights, ids = router.route(hidden, logits, indices, input_ids, mask)
        if isinstance(router, ZeroExpertRouter):
            weights, ids, share = split_zero_experts(weights, ids, router.num_logical_experts)
        return weights, router.placed(ids, indices, num_tokens), share

    def _check_logits(self, router: BaseRouter, logits: torch.Tensor) -> None:
        """The library's rules choose among all columns: one too many would be an expert that is
        not there, seen only by the tokens that choose it."""
        columns = logits.shape[-1] if logits.ndim else 0
        if type(router) in _OF_EXPERTS and columns != self.logical_num_experts:
            raise ConclaveValueError(
                f"router_logits: expected {self.logical_num_experts} columns as experts, found "
                f"shape {list(logits.shape)}"
            )


def _selects_itself(router: BaseRouter) -> bool:
    return type(router).select_experts is not BaseRouter.select_experts
