"""The backend's name in transformers, by whatever way its version has."""

from __future__ import annotations

import importlib
from typing import Any

from conclave.errors import ConclaveValueError
from conclave.transformers._dispatch import IMPLEMENTATION, require_effect, watch_selection
from conclave.transformers._experts import ask_again, experts_forward
from conclave.transformers._guard import guard
from conclave.transformers._packed import release_when_packed
from conclave.transformers._release import (
    guard_released,
    modules_with_tied_weights,
    require_weights,
)
from conclave.transformers._tally import forget_calls


def _registries() -> tuple[list[Any], ImportError | None]:
    """Where this version of transformers looks functions up: in one place, or in two. With what
    kept another from being found: a package that transformers imports there may be broken."""
    found, failed = [], None
    for module, name in (
        ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
        ("transformers.integrations.finegrained_fp8", "ALL_FP8_EXPERTS_FUNCTIONS"),
    ):
        try:
            registry = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            failed = error
            continue
        if registry is not None:
            found.append(registry)
    return found, failed


def register() -> None:
    """Makes "conclave" known to transformers. Importing the package does it.

    Raises ImportError for a transformers without an experts interface: 5.0 is the first with one.
    """
    registries, failed = _registries()
    if not registries:
        import transformers

        cause = f" ({failed})" if failed is not None else ""
        raise ImportError(
            f"transformers {transformers.__version__} has no experts interface; 5.0 or newer "
            f"has{cause}"
        ) from failed
    for registry in registries:
        registry.register(IMPLEMENTATION, experts_forward)
    _allow_name()
    watch_selection()


def _allow_name() -> None:
    """Versions before 5.7 compare the name with a list that is written into the code."""
    from transformers import PreTrainedModel

    check = getattr(PreTrainedModel, "get_correct_experts_implementation", None)
    if check is None or getattr(check, "_conclave", False) or _reads_registry(check):
        return

    def with_ours(self: Any, requested_experts: str | None) -> str:
        if requested_experts == IMPLEMENTATION:
            return IMPLEMENTATION
        return check(self, requested_experts)

    with_ours._conclave = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_experts_implementation = with_ours  # type: ignore


def _reads_registry(check: Any) -> bool:
    return "ALL_EXPERTS_FUNCTIONS" in check.__code__.co_names


def _require_weights_of(model: Any, name: Any = None, *_: Any, **__: Any) -> None:
    """Before transformers selects a backend of its own: that would read released weights."""
    if name != IMPLEMENTATION:
        for module in model.modules():
            require_weights(module)


def set_implementation(model: Any, name: str = IMPLEMENTATION, release: bool = False) -> None:
    """Selects the experts backend of a loaded model, in every version of transformers.

    `backend_report` tells afterwards which modules it ran. Experts that do not dispatch stay as
    they are, with a warning: use `patch` for them.

    Args:
        model: a model of transformers.
        name: "conclave", or a backend of transformers.
        release: frees a module's own copy of the experts as soon as they are packed, at its first
            call, unless other modules of `model` hold the same parameters. The model cannot be
            trained, saved, copied, moved or given another backend then; `load_state_dict` brings
            new weights.

    Raises:
        ConclaveValueError: `release` with another backend than "conclave".
        ConclaveUnsupportedError: none of the model's experts dispatch.
        ConclaveRuntimeError: another backend for a model whose weights were released.
    """
    if name != IMPLEMENTATION:
        if release:
            raise ConclaveValueError(f"release: {name} reads the weights of the model")
    _require_weights_of(model, name)
    if name == IMPLEMENTATION:
        require_effect(model)
    forget_calls(model)
    tied = modules_with_tied_weights(model) if release else ()
    for module in model.modules():
        release_when_packed(module, release and module not in tied)
        ask_again(module)
    setter = getattr(model, "set_experts_implementation", None)
    if setter is not None:
        setter(name)
    if release:
        guard_released(model)
        if setter is not None:
            guard(model, "set_experts_implementation", _require_weights_of)
    for module in model.modules():  # some layers hold a copy of the configuration
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", name) != name:
            config._experts_implementation = name
