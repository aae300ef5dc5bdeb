"""Modules whose own copy of packed weights is freed.

Their parameters are left without elements. Saving, copying or moving such a module would lose them,
so that these refuse; `load_state_dict` gives the parameters their memory back for the new values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from conclave._watched import version_of
from conclave.errors import ConclaveRuntimeError
from conclave.transformers._guard import guard

_FREED = "_conclave_freed"  # of a module: {name of a parameter: its shape and type}
_UNFILLED = "_conclave_unfilled"  # {name: the parameter and its version before the new values}

_Freed = dict[str, tuple[torch.Size, torch.dtype]]
_Unfilled = dict[str, tuple[torch.nn.Parameter, int]]


def freed_of(module: torch.nn.Module) -> _Freed:
    """The parameters of a module that have no memory now; empty for other modules."""
    return module.__dict__.get(_FREED, {})


def free(module: torch.nn.Module, names: Iterable[str]) -> int:
    """Frees those parameters of a module that have memory of their own; its bytes."""
    freed = module.__dict__.get(_FREED)
    if freed is None:
        freed = module.__dict__[_FREED] = {}
        module.register_state_dict_pre_hook(_refuse_state)
        module._register_load_state_dict_pre_hook(_restore, with_module=True)
        module.register_load_state_dict_post_hook(_settle)
        guard_released(module)
    count = 0
    for name in names:
        weights = module._parameters.get(name)
        if weights is None or weights.numel() == 0 or hasattr(weights, "to_local"):
            continue
        count += weights.numel() * weights.element_size()
        freed[name] = (weights.shape, weights.dtype)
        weights.data = weights.data.new_empty(0)
    return count


def modules_with_tied_weights(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules of a model that hold parameters which others hold too, and so may not free them."""
    holders: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in model.modules():
        for weights in module._parameters.values():
            if weights is not None:
                holders.setdefault(weights, []).append(module)
    return {module for found in holders.values() if len(found) > 1 for module in found}


def guard_released(model: torch.nn.Module) -> None:
    """Moving, casting, sharing, copying and pickling a model raise while a part of it is released,
    before the parts that stand earlier are touched."""
    guard(model, "_apply", _require_all)
    guard(model, "__reduce_ex__", _require_all)


def _require_all(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    for module in model.modules():
        require_weights(module)


def require_weights(module: torch.nn.Module) -> None:
    """Raises ConclaveRuntimeError for a module without its weights."""
    _settle(module)
    for name in freed_of(module):
        weights = module._parameters.get(name)
        if weights is not None and weights.numel() == 0:
            raise ConclaveRuntimeError(
                f"{type(module).__name__}: {name} was released after packing; "
                "load_state_dict brings it back"
            )


def _refuse_state(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    require_weights(module)


def _restore(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Memory for the values that are about to be copied."""
    _settle(module)
    for name, (shape, _dtype) in freed_of(module).items():
        weights = module._parameters.get(name)
        values = state.get(prefix + name)
        if weights is None or weights.numel() > 0 or values is None:
            continue
        if values.shape == shape and not values.is_meta:
            weights.data = weights.data.new_empty(shape)
            version = version_of(weights)
            if version is not None:
                module.__dict__.setdefault(_UNFILLED, {})[name] = (weights, version)


def _settle(module: torch.nn.Module, *_: Any) -> None:
    """Takes memory back that no values came into: torch collects errors of a copy and goes on."""
    unfilled: _Unfilled = module.__dict__.pop(_UNFILLED, {})
    for name, (weights, version) in unfilled.items():
        if module._parameters.get(name) is weights and version_of(weights) == version:
            weights.data = weights.data.new_empty(0)
