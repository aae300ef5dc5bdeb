"""Arguments that require gradients: the calls here record no graph, so that they are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveValueError


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raises ConclaveValueError for the first tensor that autograd would expect a graph of.

    Args:
        arguments: by name, what a call was given: arrays, sequences of them, None, anything else.
            Only tensors of torch that require gradients are refused, and only where torch records.
    """
    name = first_that_requires(arguments)
    if name is not None:
        raise ConclaveValueError(
            f"{name}: it requires gradients, which are not computed here; "
            f"use torch.no_grad() or {name}.detach()"
        )


def refuse_among(names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    """`refuse` for the arguments of a call that is made often: nothing is built for it.

    Args:
        names: of the arguments, in their order.
        arguments: arrays or None.
    """
    torch = _frameworks.torch()
    if torch is None or not torch.is_grad_enabled():
        return
    for argument in arguments:
        if argument is not None and getattr(argument, "requires_grad", False):
            refuse(dict(zip(names, arguments, strict=True)))


def first_that_requires(arguments: Mapping[str, Any]) -> str | None:
    """The name of the first tensor that requires gradients while torch records; else None."""
    torch = _frameworks.torch()
    if torch is None or not torch.is_grad_enabled():
        return None
    for name, tensor in _named_tensors(arguments, torch.Tensor):
        if tensor.requires_grad:
            return name
    return None


def _named_tensors(arguments: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        if isinstance(value, kind):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from (
                (f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, kind)
            )
