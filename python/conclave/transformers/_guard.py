"""Methods of single modules that are refused while a call would do harm.

A guard stands in the dictionary of one module, before the method of its class. It holds the module
weakly, so that a model is freed as soon as nobody holds it, and goes along when it is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_Check = Callable[..., None]  # of the module and the call's arguments; raises


class _Guard:
    """In place of a method: asks first."""

    def __init__(self, module: torch.nn.Module, method: str, check: _Check) -> None:
        self._module: Any = weakref.ref(module)
        self._method = method
        self.check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        self.check(module, *args, **kwargs)
        return getattr(type(module), self._method)(module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _Guard, (self._module(), self._method, self.check)


def guard(module: torch.nn.Module, method: str, check: _Check) -> None:
    """From now on `check` is called before the method, unless another guards it already.

    `__reduce_ex__` is what both `copy.deepcopy` and pickle (so `torch.save`) ask a module for.
    """
    module.__dict__.setdefault(method, _Guard(module, method, check))


def unguard(module: torch.nn.Module, method: str, check: _Check) -> None:
    """Takes that guard away again."""
    found = module.__dict__.get(method)
    if isinstance(found, _Guard) and found.check is check:
        del module.__dict__[method]
