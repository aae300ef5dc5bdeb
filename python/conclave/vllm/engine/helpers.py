"""Small functions that MoE code of vLLM imports from beside it."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from conclave.errors import ConclaveRuntimeError, ConclaveValueError


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """The first multiple of y from x on."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """The last multiple of y up to x."""
    return x // y * y


def next_power_of_2(n: int) -> int:
    """The first power of two from n on; 1 below 1."""
    return 1 if n < 1 else 1 << (n - 1).bit_length()


class _OnceLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with vLLM's *_once, which say a message with the same values one time."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said = functools.lru_cache(maxsize=None)(self.log)

    def debug_once(self, message: str, *values: Any, **_: Any) -> None:
        self._said(logging.DEBUG, message, *values)

    def info_once(self, message: str, *values: Any, **_: Any) -> None:
        self._said(logging.INFO, message, *values)

    def warning_once(self, message: str, *values: Any, **_: Any) -> None:
        self._said(logging.WARNING, message, *values)


def init_logger(name: str) -> _OnceLogger:
    """The logger of this name of the logging module."""
    return _OnceLogger(logging.getLogger(name))


class PluggableLayer(torch.nn.Module):
    """A module that is known by a name."""

    registered: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, name: str, **_: Any) -> Callable[[type], type]:
        """A decorator of a class. Raises ConclaveValueError for a name that is taken."""

        def keep(layer: type) -> type:
            known = cls.registered.setdefault(name, layer)
            if known is not layer:
                raise ConclaveValueError(f"name: {name!r} is taken by {known.__name__}")
            return layer

        return keep


class CustomOp(PluggableLayer):
    """A module whose forward is that of the device, where it has one: `forward_cuda`, else
    `forward_native`."""

    registered: ClassVar[dict[str, type]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        call = self.forward_cuda if on_cuda else self.forward_native
        return call(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)


# No kernel here is compiled by Triton, whether it is installed or not.
HAS_NO_TRITON = False

_library: torch.library.Library | None = None


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    **_: Any,
) -> None:
    """Makes op_func torch.ops.vllm.<op_name>, for every device."""
    global _library
    if _library is None:
        _library = torch.library.Library("vllm", "FRAGMENT")
    if hasattr(torch.ops.vllm, op_name):
        raise ConclaveRuntimeError(f"op_name: torch.ops.vllm has {op_name} already")
    schema = torch.library.infer_schema(op_func, mutates_args=mutates_args or [])
    _library.define(op_name + schema)
    _library.impl(op_name, op_func, dispatch_key="CompositeExplicitAutograd")
    if fake_impl is not None:
        _library._register_fake(op_name, fake_impl)


def has_no_package(*_: Any, **__: Any) -> bool:
    """False: no layer here uses that package, whether it is installed or not."""
    return False


def is_torch_equal_or_newer(target: str) -> bool:
    """Whether torch has this version, or a later one."""

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]

    return numbers(torch.__version__) >= numbers(target)
