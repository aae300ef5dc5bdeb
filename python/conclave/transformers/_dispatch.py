"""Models on which selecting the experts backend has no effect, or not everywhere."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError
from conclave.transformers._find import Candidate, find_candidates

IMPLEMENTATION = "conclave"
logger = logging.getLogger("conclave.transformers")
_warned: set[str] = set()


def dispatches(module: torch.nn.Module) -> bool:
    """Whether transformers exchanges the forward of an experts module."""
    return hasattr(type(module).forward, "__wrapped__")


def experts_of(model: torch.nn.Module) -> list[Candidate]:
    """The MoE blocks of a model, without mixtures of attention heads."""
    return [c for c in find_candidates(model) if not c.is_attention]


def is_replaced(module: torch.nn.Module) -> bool:
    """Whether `patch` exchanged this module's forward. transformers does so too, for packed
    experts, and so do packages that spread models over devices."""
    owner = getattr(module.__dict__.get("forward"), "__module__", None) or ""
    return owner.startswith(f"{__package__}.")


def _without_effect(model: torch.nn.Module) -> tuple[list[Candidate], bool]:
    """Blocks whose experts no backend reaches, and whether there are others."""
    every = experts_of(model)
    found = [c for c in every if not (is_replaced(c.block) or is_replaced(c.experts))]
    silent = [c for c in found if not dispatches(c.experts)]
    return silent, len(silent) < len(found)


def _message(model: torch.nn.Module, silent: list[Candidate]) -> str:
    kinds = ", ".join(dict.fromkeys(type(c.experts).__name__ for c in silent))
    return (
        f"{type(model).__name__}: {kinds} ({silent[0].path}) does not dispatch through the experts "
        f'interface of transformers, so that experts_implementation="{IMPLEMENTATION}" changes '
        "nothing there; conclave.transformers.patch(model) replaces whole blocks"
    )


def require_effect(model: torch.nn.Module) -> None:
    """Raises ConclaveUnsupportedError where the backend would run none of a model's experts; warns
    where it would run some."""
    silent, some_dispatch = _without_effect(model)
    if silent and not some_dispatch:
        raise ConclaveUnsupportedError(_message(model, silent))
    warn_without_effect(model)


def warn_without_effect(model: torch.nn.Module) -> None:
    """One warning for each class of experts that no backend reaches."""
    silent, _ = _without_effect(model)
    kinds = ", ".join(dict.fromkeys(type(c.experts).__name__ for c in silent))
    if kinds and kinds not in _warned:
        _warned.add(kinds)
        logger.warning(_message(model, silent))


def _names_in(requested: Any) -> list[Any]:
    """The implementations that a call or a configuration asks for, one or one a part."""
    return list(requested.values()) if isinstance(requested, dict) else [requested]


def watch_selection() -> None:
    """Models that are made with the backend's name, or get it from `set_experts_implementation` of
    transformers, are looked at: transformers itself says nothing."""
    from transformers import PreTrainedModel

    for name in ("post_init", "set_experts_implementation"):
        method = getattr(PreTrainedModel, name, None)
        if method is not None and not hasattr(method, "_conclave"):
            setattr(PreTrainedModel, name, _watched(method))


def _watched(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        configured = getattr(self.config, "_experts_implementation", None)
        asked = itertools.chain.from_iterable(map(_names_in, (*args, *kwargs.values())))
        if IMPLEMENTATION in (configured, *asked):
            warn_without_effect(self)
        return result

    wrapper._conclave = True  # type: ignore[attr-defined]
    return wrapper
