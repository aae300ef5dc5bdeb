"""What every router does around its rule: checks, capture, replicas, the type of ids."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from conclave import _gradients
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.routing import RoutingMethodType
from conclave.vllm.eplb import EplbLayerState, map_to_physical

Pair = tuple[torch.Tensor, torch.Tensor]
CaptureFn = Callable[[torch.Tensor], None]

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_INTEGERS = (torch.int32, torch.int64)


class FusedMoERouter(abc.ABC):
    """What a `FusedMoE` asks of a router. `BaseRouter` is the one to derive from for a rule of
    your own."""

    @abc.abstractmethod
    def set_capture_fn(self, capture_fn: CaptureFn | None) -> None:
        """Calls capture_fn with the ids of experts [T, k] of every call; None: no longer."""

    @property
    @abc.abstractmethod
    def routing_method_type(self) -> RoutingMethodType:
        """The routing method that the rule amounts to."""

    @abc.abstractmethod
    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        """Weights [T, k] float32 and ids [T, k] of experts. Where there are replicas a `BaseRouter`
        gives physical experts; for other routers the layer chooses them."""


class BaseRouter(FusedMoERouter):
    """A router whose rule is `_compute_routing`.

    Args:
        top_k: k.
        global_num_experts: of all ranks, replicas included.
        eplb_state: a balancer's tensors, by which ids become those of physical experts.
        enable_eplb: whether that is done; by default if there is an eplb_state.
        indices_type_getter: says the type of ids where a call does not.
    """

    _gives_checked = False  # whether weights and ids of the rule are the library's own

    def __init_subclass__(cls, **more: Any) -> None:
        """A rule of its own is checked, whatever the class that it derives from."""
        super().__init_subclass__(**more)
        if "_compute_routing" in cls.__dict__ and "_gives_checked" not in cls.__dict__:
            cls._gives_checked = False

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        eplb_state: EplbLayerState | None = None,
        enable_eplb: bool | None = None,
        indices_type_getter: Callable[[], torch.dtype | None] | None = None,
    ) -> None:
        if not 1 <= top_k <= global_num_experts:
            raise ConclaveValueError(f"top_k: expected 1 to {global_num_experts}, found {top_k}")
        self.top_k = top_k
        self.global_num_experts = global_num_experts
        self.eplb_state = eplb_state
        self.enable_eplb = (eplb_state is not None) if enable_eplb is None else enable_eplb
        self.indices_type_getter = indices_type_getter
        self.capture_fn: CaptureFn | None = None
        if self.enable_eplb and eplb_state is None:
            raise ConclaveValueError("eplb_state: enable_eplb needs it, found None")

    def set_capture_fn(self, capture_fn: CaptureFn | None) -> None:
        """Calls capture_fn with the ids [T, k] of every call, before replicas are chosen: of
        experts, above those for zero experts, and -1 for padding. None: no longer."""
        self.capture_fn = capture_fn

    @abc.abstractmethod
    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        """The rule: weights [T, k] and ids of experts [T, k]."""

    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Pair:
        """Weights [T, k] float32 and ids [T, k], of physical experts with EPLB.

        Args:
            hidden_states: [T, H]. router_logits: [T, E].
            topk_indices_dtype: of the ids: int32 or int64; by default what the rule gives.
            input_ids: [T] token ids, for hash tables.
            num_tokens: the tokens behind the first num_tokens are padding, which EPLB does not
                count; an int, or a tensor of one number on the device.
            padding_mask: [T] bool. Where it is False the token is padding: its ids are -1 and its
                weights 0.

        Raises:
            ConclaveValueError: naming what does not fit, and what EPLB has not been given.
        """
        weights, ids = self.route(
            hidden_states, router_logits, topk_indices_dtype, input_ids, padding_mask
        )
        weights, ids = self._resolve(hidden_states, weights, ids)
        return weights, self.placed(ids, topk_indices_dtype, num_tokens)

    def route(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        input_ids: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Pair:
        """The first half of `select_experts`: by the rule, checked and captured. Zero experts have
        ids above those of experts."""
        if self.enable_eplb and self.eplb_state is not None:
            self.eplb_state.check()
        wanted = self._indices_type(topk_indices_dtype)
        found = self._compute_routing(hidden_states, router_logits, wanted, input_ids=input_ids)
        if not self._gives_checked:
            found = checked_routing(found, len(hidden_states), type(self).__name__)
        weights, ids = found
        if padding_mask is not None:
            weights, ids = without_padding(weights, ids, padding_mask)
        if self.capture_fn is not None:
            self.capture_fn(ids)
        return weights, ids

    def placed(
        self,
        ids: torch.Tensor,
        topk_indices_dtype: torch.dtype | None = None,
        num_tokens: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The second half: physical experts with EPLB, counted, in the type that is asked for."""
        if self.enable_eplb and self.eplb_state is not None:
            ids = map_to_physical(ids, self.eplb_state, num_tokens)
        wanted = self._indices_type(topk_indices_dtype)
        return ids if wanted is None else ids.to(wanted)

    def _resolve(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Pair:
        """What becomes of ids above those of experts."""
        del hidden
        return weights, ids

    def _indices_type(self, asked: torch.dtype | None) -> torch.dtype | None:
        if asked is None and self.indices_type_getter is not None:
            asked = self.indices_type_getter()
        if asked is not None and asked not in _INTEGERS:
            raise ConclaveTypeError(f"topk_indices_dtype: expected int32 or int64, found {asked}")
        return asked


def checked_score(scoring_func: str) -> str:
    """A name of a score."""
    if scoring_func not in _SCORES:
        raise ConclaveValueError(
            f"scoring_func: expected one of {', '.join(_SCORES)}, found {scoring_func!r}"
        )
    return scoring_func


def checked_routing(found: Any, tokens: int, source: str) -> Pair:
    """Weights in float32 and ids that some rule gave, of as many tokens as there are."""
    if not isinstance(found, (tuple, list)) or len(found) < 2:
        raise ConclaveTypeError(f"{source}: expected weights and ids, found {type(found).__name__}")
    weights, ids = found[0], found[1]
    for name, tensor in (("weights", weights), ("ids", ids)):
        if not isinstance(tensor, torch.Tensor):
            raise ConclaveTypeError(
                f"{source}: expected a tensor of {name}, found {type(tensor).__name__}"
            )
    if weights.shape != ids.shape or ids.ndim != 2:
        raise ConclaveValueError(
            f"{source}: expected weights and ids of one shape [T, k], found "
            f"{list(weights.shape)} and {list(ids.shape)}"
        )
    if len(ids) != tokens:
        raise ConclaveValueError(f"{source}: expected {tokens} rows as tokens, found {len(ids)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConclaveTypeError(f"{source}: expected ids of integers, found {ids.dtype}")
    return weights.float(), ids if ids.dtype in _INTEGERS else ids.int()


def without_padding(weights: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Pair:
    """Tokens where the mask is False choose nothing."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConclaveTypeError(f"padding_mask: expected a tensor of bool, found {kind}")
    if tuple(mask.shape) != (len(ids),):
        raise ConclaveValueError(
            f"padding_mask: expected shape [{len(ids)}] as tokens, found {list(mask.shape)}"
        )
    kept = mask.to(ids.device).unsqueeze(1)
    return torch.where(kept, weights, 0.0), torch.where(kept, ids, -1)


def refuse_gradients(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    _gradients.refuse({"router_logits": logits, "e_score_correction_bias": bias})
