"""A method's `apply`, given what its parameters have names for: versions of vLLM differ in them."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.quant_method.base import FusedMoEMethodBase

_OF_CALL = (
    *("layer", "x", "topk_weights", "topk_ids", "router_logits", "input_ids", "out"),
    *("shared_experts", "shared_experts_input", "router"),
)
_OF_LAYER: dict[str, Callable[[Any], Any]] = {
    **{
        name: operator.attrgetter(name)
        for name in (
            *("top_k", "renormalize", "use_grouped_topk", "topk_group", "num_expert_group"),
            *("global_num_experts", "expert_map", "custom_routing_function", "scoring_func"),
            *("routed_scaling_factor", "e_score_correction_bias", "enable_eplb"),
            "apply_router_weight_on_input",
        )
    },
    "activation": operator.attrgetter("activation.value"),
    **{
        name: operator.attrgetter(f"eplb_state.{name}")
        for name in ("expert_load_view", "logical_to_physical_map", "logical_replica_count")
    },
}


@dataclasses.dataclass(frozen=True)
class MethodCall:
    """How a method is called."""

    function: str  # apply or apply_monolithic
    names: frozenset[str]
    routes: bool  # the method chooses experts by logits

    @staticmethod
    def of(method: FusedMoEMethodBase) -> MethodCall:
        """Reads the parameters. Raises ConclaveTypeError for one that no layer can give."""
        if method.is_monolithic:
            return MethodCall("apply_monolithic", _names(method, "apply_monolithic"), True)
        named = inspect.signature(method.apply).parameters
        routes = "router_logits" in named and "topk_ids" not in named
        return MethodCall("apply", _names(method, "apply"), routes)

    def run(
        self,
        method: FusedMoEMethodBase,
        layer: Any,
        rows: torch.Tensor,
        out: torch.Tensor | None,
        **of_call: Any,
    ) -> torch.Tensor:
        """The weighted sum [T, H], in `out` if one is given. of_call: topk_weights and topk_ids, or
        router_logits and input_ids."""
        given = {"layer": layer, "x": rows, "out": out, "router": layer.router, **of_call}
        arguments = {
            name: _OF_LAYER[name](layer) if name in _OF_LAYER else given.get(name)
            for name in self.names
        }
        found = getattr(method, self.function)(**arguments)
        _check(found, rows, type(method).__name__)
        if out is None or found is out:
            return found  # type: ignore[no-any-return]
        return out.copy_(found)


_OF_WHOLE_SIZE = (
    "GPTQMarlinMoEMethod",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "CompressedTensorsWNA16MoEMethod",
)


def takes_whole_size(method: FusedMoEMethodBase) -> bool:
    """Whether create_weights is told the intermediate size of all ranks: where it has the name
    intermediate_size_full, and by the class' name, as vLLM decides it."""
    named = inspect.signature(method.create_weights).parameters
    return "intermediate_size_full" in named or type(method).__name__ in _OF_WHOLE_SIZE


def _names(method: FusedMoEMethodBase, function: str) -> frozenset[str]:
    found = set()
    for name, parameter in inspect.signature(getattr(method, function)).parameters.items():
        kind = parameter.kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= {*_OF_CALL, *_OF_LAYER}
        elif name in _OF_CALL or name in _OF_LAYER:
            found.add(name)
        elif parameter.default is parameter.empty and kind is not inspect.Parameter.VAR_POSITIONAL:
            raise ConclaveTypeError(
                f"quant_method: {function} of {type(method).__name__} needs {name}, which a layer "
                "does not have"
            )
    return frozenset(found)


def _check(found: Any, rows: torch.Tensor, name: str) -> None:
    if isinstance(found, tuple):
        raise ConclaveUnsupportedError(
            f"quant_method: apply of {name} returned {len(found)} tensors; shared experts are the "
            "layer's, so that it returns the routed rows alone"
        )
    if not isinstance(found, torch.Tensor):
        raise ConclaveTypeError(
            f"quant_method: apply of {name} returned {type(found).__name__}, expected a tensor"
        )
    if found.shape != rows.shape or found.device != rows.device:
        raise ConclaveValueError(
            f"quant_method: apply of {name} returned shape {list(found.shape)} on {found.device}, "
            f"expected {list(rows.shape)} on {rows.device}"
        )
    if not found.is_floating_point():
        raise ConclaveTypeError(f"quant_method: apply of {name} returned {found.dtype}")
