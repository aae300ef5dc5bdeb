"""The function that transformers calls in place of an experts module's forward."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from conclave._watched import version_of
from conclave.errors import ConclaveUnsupportedError
from conclave.transformers._packed import packed_experts
from conclave.transformers._release import require_weights
from conclave.transformers._tally import note_eager, note_ours, note_traced
from conclave.transformers._traits import NotOurs, local_part

logger = logging.getLogger("conclave.transformers")

_WEIGHTS = (
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
)


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why a module runs eagerly, as long as its weights are of these kinds."""

    reason: str
    kinds: list[tuple[Any, ...]]


_refused: weakref.WeakKeyDictionary[torch.nn.Module, _Refusal] = weakref.WeakKeyDictionary()
_warned: set[str] = set()
_modules_by_id: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """The weighted sum of the chosen experts.

    Args:
        self: the experts module of transformers.
        hidden_states: [T, H] float32, bfloat16 or float16.
        top_k_index: [T, k] integers. Ids of num_experts and above contribute nothing: they are
            those of other ranks.
        top_k_weights: [T, k], or [T, E] of which the chosen ones are taken.
        kwargs: of other backends; the module's own forward gets them where it has to serve.

    Returns:
        [T, H] of the type of hidden_states; of a sharded module the part of this process.
    """
    if torch.compiler.is_compiling():
        return _compiled(self, hidden_states, top_k_index, top_k_weights, kwargs)
    reason = _why_not(self, hidden_states, top_k_weights)
    if reason:
        return _eager(self, reason, hidden_states, top_k_index, top_k_weights, kwargs)
    try:
        out = run_experts(self, hidden_states, top_k_index, top_k_weights)
        note_ours(self)
        return out
    except (NotOurs, ConclaveUnsupportedError) as error:
        _refuse(self, str(error))
        return _eager(self, str(error), hidden_states, top_k_index, top_k_weights, kwargs)


def run_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """As experts_forward, without a way out: raises NotOurs where the library cannot serve."""
    hidden = local_part(hidden_states).detach()
    packed = packed_experts(module, hidden.shape[-1])
    ids, weights = local_part(top_k_index), local_part(top_k_weights).detach()
    if weights.shape != ids.shape:
        weights = weights.gather(1, ids)
    layer = packed.layer_for(module, ids.shape[-1])
    return layer.forward(_dense(hidden), topk_ids=_dense(ids), topk_weights=_dense(weights))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def why_gradients(arguments: dict[str, Any]) -> str:
    """The reason of a call that autograd expects a graph of; empty for other calls."""
    if not torch.is_grad_enabled():
        return ""
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return f"gradients are required ({name}), which are not computed; use torch.no_grad()"
    return ""


def _why_gradients(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_weights: torch.Tensor
) -> str:
    given = {"hidden_states": hidden_states, "top_k_weights": top_k_weights}
    return why_gradients(given | {n: module._parameters.get(n) for n in _WEIGHTS})


def _why_not(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_weights: torch.Tensor
) -> str:
    """Why a call cannot be ours; empty if it can."""
    return _why_gradients(module, hidden_states, top_k_weights) or _why_refused(module)


def _kinds_of(module: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Which weights a module has, as far as a refusal depends on it."""
    weights = _weights_of(module)
    return [(id(w), w.dtype, w.shape, w.device, version_of(w) is None) for w in weights]


def _refuse(module: torch.nn.Module, reason: str) -> None:
    _refused[module] = _Refusal(reason, _kinds_of(module))


def _why_refused(module: torch.nn.Module) -> str:
    """The reason of a refusal; empty for a module with other weights than it had then."""
    found = _refused.get(module) if _refused else None
    if found is None:
        return ""
    if found.kinds != _kinds_of(module):
        ask_again(module)
        return ""
    return found.reason


def ask_again(module: torch.nn.Module) -> None:
    """A module that was refused may be another by now."""
    _refused.pop(module, None)


def _weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [w for name, w in module._parameters.items() if name in _WEIGHTS and w is not None]


def _eager(
    module: torch.nn.Module,
    reason: str,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The module's own forward, with one warning for each reason."""
    require_weights(module)
    if reason not in _warned:
        _warned.add(reason)
        logger.warning("experts run eagerly: %s", reason)
    note_eager(module, reason)
    original = inspect.unwrap(type(module).forward)
    return original(
        module, hidden_states, top_k_index, top_k_weights, **_accepted(original, kwargs)
    )


def _accepted(function: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that the function knows; backends differ in them."""
    if not kwargs:
        return kwargs
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return kwargs
    known = {p.name for p in parameters}
    return {name: value for name, value in kwargs.items() if name in known}


# torch.compile: one opaque operator, so that graphs stay whole. It is given the weights too, which
# makes them inputs of the graph as it expects, and the id of the module that they belong to.


def _compiled(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    weights = [w for name, w in module._parameters.items() if name in _WEIGHTS and w is not None]
    reason = _why_gradients(module, hidden_states, top_k_weights)
    needs_weights = reason != ""
    # Of released weights the operator complains when it runs; an error while tracing would stay.
    if needs_weights and all(w.numel() != 0 for w in weights):
        note_traced(id(module), reason)
        original = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        return original(module, hidden_states, top_k_index, top_k_weights, **kwargs)
    return torch.ops.conclave.experts(
        hidden_states.detach(),
        top_k_index,
        top_k_weights.detach(),
        [w.detach() for w in weights],
        id(module),
        needs_weights,
    )


def _module_of(key: int) -> torch.nn.Module:
    """The living module of an id. The graph that asks has a guard on it, so it is alive."""
    module = _modules_by_id.get(key)
    if module is None:
        for thing in gc.get_objects():
            if id(thing) == key:
                module = thing
                break
        else:
            raise RuntimeError("the experts module of a compiled graph is gone")
        _modules_by_id[key] = module
    return module


def _operator(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: list[torch.Tensor],
    module_id: int,
    needs_weights: bool,
) -> torch.Tensor:
    module = _module_of(module_id)
    if needs_weights:
        require_weights(module)
    reason = _why_refused(module)
    with torch.no_grad():
        if not reason:
            try:
                out = run_experts(module, hidden_states, top_k_index, top_k_weights)
                note_ours(module)
                return out
            except (NotOurs, ConclaveUnsupportedError) as error:
                reason = str(error)
                _refuse(module, reason)
        return _eager(module, reason, hidden_states, top_k_index, top_k_weights, {})


def _fake(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: list[torch.Tensor],
    module_id: int,
    needs_weights: bool,
) -> torch.Tensor:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


def define_operator() -> None:
    """torch.ops.conclave.experts with its shapes; once a process."""
    torch.library.custom_op(
        "conclave::experts",
        _operator,
        mutates_args=(),
        schema="(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, "
        "Tensor[] weights, int module_id, bool needs_weights) -> Tensor",
    )
    torch.library.register_fake("conclave::experts", _fake)
