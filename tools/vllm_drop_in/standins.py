"""Stand-ins for what a model file of vLLM imports beside its MoE layers.

Modules of the package's own table come from conclave.vllm.install; those of `parts.py` compute in
eager torch; everything else of vLLM is a class that can be named, derived from and made, and does
nothing. The files of `vllm/model_executor/models` are the tree's own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from typing import Any

import parts

_MODELS = "vllm.model_executor.models"


class _Kind(type):
    """Classes that stand for anything in annotations and calls."""

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")


def stand_in(name: str) -> Any:
    """A class of this name: made with any arguments, and a decorator that changes nothing."""

    def make(cls: Any, *args: Any, **_: Any) -> Any:
        if cls is kind and len(args) == 1 and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    kind = _Kind(name, (), {"__new__": make, "__init__": lambda self, *_, **__: None})
    return kind


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves what the finder of conclave.vllm does not."""

    def __init__(self, tree: pathlib.Path) -> None:
        self._models = tree / "vllm" / "model_executor" / "models"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("vllm.") or fullname.startswith(f"{_MODELS}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _MODELS:
            module.__path__ = [str(self._models)]
            return
        module.__getattr__ = lambda name: _named(module, name)  # type: ignore[method-assign]


def _named(module: types.ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = getattr(parts, name, None) or stand_in(name)
    setattr(module, name, value)
    return value


def add_to_table() -> None:
    """Names of the engine that the package's own modules leave out."""
    import vllm.config
    import vllm.model_executor.layers.quantization as quantization

    vllm.config.CacheConfig = stand_in("CacheConfig")
    quantization.__getattr__ = lambda name: _named(quantization, name)


def place(tree: pathlib.Path) -> None:
    """Serves the tree's model files; conclave.vllm.install is to be in force."""
    sys.meta_path.append(Finder(tree))
    add_to_table()
