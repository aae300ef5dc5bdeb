"""Modules whose own copy of packed weights is freed.

Their parameters are left without elements. Saving such a module would write nothing, so that
`state_dict` refuses; `load_state_dict` gives the parameters their memory back for the new values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from conclave.errors import ConclaveRuntimeError

_FREED = "_conclave_freed"  # of a module: {name of a parameter: its shape, type and device}

_Freed = dict[str, tuple[torch.Size, torch.dtype, torch.device]]


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
    count = 0
    for name in names:
        weights = module._parameters.get(name)
        if weights is None or weights.numel() == 0 or hasattr(weights, "to_local"):
            continue
        count += weights.numel() * weights.element_size()
        freed[name] = (weights.shape, weights.dtype, weights.device)
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


def require_weights(module: torch.nn.Module) -> None:
    """Raises ConclaveRuntimeError for a module without its weights."""
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
    for name, (shape, dtype, device) in freed_of(module).items():
        weights = module._parameters.get(name)
        values = state.get(prefix + name)
        if weights is None or weights.numel() > 0 or values is None:
            continue
        if values.shape == shape:
            weights.data = torch.empty(shape, dtype=dtype, device=device)
