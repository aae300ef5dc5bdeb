"""Numbers of a call, and limits of its choices, as Python callers write them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from conclave import _frameworks
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

Array = Any

_Kind = TypeVar("_Kind")

_MOST_LAYERS = 2**31 - 1


def flags_of(banned: Array | Sequence[int] | None, num_columns: Callable[[], int]) -> Array | None:
    """Bans as flags: ids in a list, tuple, set or range become one bool for each expert; arrays
    stay as they are.

    Args:
        banned: ids, or an array of bools.
        num_columns: gives the number of experts, zero experts included.

    Raises:
        ConclaveTypeError, ConclaveValueError: for an id that is no integer, or names no expert.
    """
    if not isinstance(banned, (list, tuple, set, frozenset, range)):
        return banned
    columns = num_columns()
    flags = bytearray(columns)
    for expert in banned:
        index = _index_of(expert)
        if index is None:
            raise ConclaveTypeError(
                f"banned_experts: expected ids, or an array of bools, found {expert!r}"
            )
        if not 0 <= index < columns:
            raise ConclaveValueError(
                f"banned_experts: expected ids of 0 to {columns - 1}, found {index}"
            )
        flags[index] = 1
    return memoryview(flags).cast("B").cast("?")


def _index_of(value: Any) -> int | None:
    """An integer of Python, numpy or torch as one of Python; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def plain(value: Any) -> Any:
    """Integers of numpy and torch as those of Python; everything else as it is."""
    if value is None or isinstance(value, int):  # of most calls
        return value
    number = _index_of(value)
    return value if number is None else number


def counts(name: str, value: Any, length: int) -> list[int]:
    """A list of numbers, or an array of them in memory of the CPU, as integers of Python.

    Args:
        length: how many there must be.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument, what was expected and found.
    """
    where = _frameworks.device_of(value)
    if where != "cpu":
        raise ConclaveValueError(
            f"{name}: expected a list, or an array of the CPU, found one of {where}, for which a "
            "call would have to wait"
        )
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, (list, tuple)):
        raise ConclaveTypeError(
            f"{name}: expected a list or a vector of integers, found {type(value).__name__}"
        )
    if len(listed) != length:
        raise ConclaveValueError(f"{name}: expected {length} numbers, found {len(listed)}")
    return [integer(f"{name}[{rank}]", item, 0, 2**31 - 1) for rank, item in enumerate(listed)]


def integer(name: str, value: Any, low: int, high: int) -> int:
    """The value of an argument that is an integer between two others.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument and its limits.
    """
    number = _index_of(value)
    if number is None:
        raise ConclaveTypeError(f"{name}: expected an integer, found {type(value).__name__}")
    if not low <= number <= high:
        raise ConclaveValueError(f"{name}: expected {low} to {high}, found {number}")
    return number


def real(name: str, value: Any) -> float:
    """The value of an argument that is a number, which may be none that is finite.

    Raises:
        ConclaveTypeError: naming the argument.
    """
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise ConclaveTypeError(f"{name}: expected a number, found {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError, RuntimeError):
        raise ConclaveTypeError(f"{name}: expected one number, found {type(value).__name__}") from (
            None
        )


def instance(name: str, value: Any, kind: type[_Kind], expected: str) -> _Kind:
    """The value of an argument that is an object of a class.

    Raises:
        ConclaveTypeError: naming the argument and what was expected.
    """
    if not isinstance(value, kind):
        raise ConclaveTypeError(f"{name}: expected {expected}, found {type(value).__name__}")
    return value


def matrix_shape(name: str, value: Any, expected: str) -> tuple[int, int]:
    """The shape of an argument that is an array with two axes.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument and what was expected.
    """
    shape = getattr(value, "shape", None)
    if shape is None:
        raise ConclaveTypeError(f"{name}: expected {expected}, found {type(value).__name__}")
    if len(shape) != 2:
        raise ConclaveValueError(f"{name}: expected {expected}, found {list(shape)}")
    return int(shape[0]), int(shape[1])


def reals(name: str, values: Any) -> list[float]:
    """The values of an argument that lists numbers: a sequence, or an array.

    Raises:
        ConclaveTypeError: naming the argument, and the place.
    """
    plain_values = values.tolist() if hasattr(values, "tolist") else values
    return [real(f"{name}[{i}]", v) for i, v in enumerate(listed(name, plain_values))]


def text(name: str, value: Any) -> str:
    """The value of an argument that is a text.

    Raises:
        ConclaveTypeError: naming the argument.
    """
    if not isinstance(value, str):
        raise ConclaveTypeError(f"{name}: expected a text, found {type(value).__name__}")
    return value


def layer(name: str, value: Any) -> int:
    """The number of a layer, which must be given; the library says whether there is such a layer.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument.
    """
    if value is None:
        raise ConclaveTypeError(f"{name}: expected a layer's number, found None")
    return integer(name, value, -_MOST_LAYERS, _MOST_LAYERS)


def integers(name: str, values: Any, low: int, high: int) -> list[int]:
    """The values of an argument that lists integers: a sequence, a set, or an array.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument, the place and its limits.
    """
    return [integer(f"{name}[{i}]", v, low, high) for i, v in enumerate(listed(name, values))]


def texts(name: str, values: Any) -> list[str]:
    """The values of an argument that lists texts.

    Raises:
        ConclaveTypeError: naming the argument, and the place.
    """
    return [text(f"{name}[{i}]", value) for i, value in enumerate(listed(name, values))]


def listed(name: str, values: Any) -> list[Any]:
    """The values of an argument that lists something.

    Raises:
        ConclaveTypeError: naming the argument.
    """
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ConclaveTypeError(f"{name}: expected a list, found {type(values).__name__}")
    try:
        return list(values)
    except TypeError as error:  # an array without an axis
        raise ConclaveTypeError(f"{name}: expected a list, found {error}") from None


def some(name: str, found: list[Any]) -> list[Any]:
    """What was listed, each once and one at least: an empty list would mean all to the library.

    Raises:
        ConclaveValueError: naming the argument.
    """
    if not found:
        raise ConclaveValueError(f"{name}: expected at least one, or None for all, found none")
    seen = set()
    for one in found:
        if one in seen:
            raise ConclaveValueError(f"{name}: expected each once, found {one} twice")
        seen.add(one)
    return found


def flag(name: str, value: Any) -> bool:
    """The value of an argument that is a bool, of numpy too.

    Raises:
        ConclaveTypeError: naming the argument.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        raise ConclaveTypeError(f"{name}: expected True or False, found {type(value).__name__}")
    return bool(value)


def path(name: str, value: Any) -> str:
    """The value of an argument that is a path.

    Raises:
        ConclaveTypeError: naming the argument.
    """
    try:
        return os.fsdecode(value)
    except TypeError:
        raise ConclaveTypeError(f"{name}: expected a path, found {type(value).__name__}") from None


def refuse(banned: Any, expert_budget: int | None) -> None:
    """Raises ConclaveUnsupportedError if a call of a router alone, on a GPU, has limits."""
    for name, value in (("banned_experts", banned), ("expert_budget", expert_budget)):
        if value is not None:
            raise ConclaveUnsupportedError(
                f"{name}: a router alone knows no limits of a call on a GPU, a layer does; or "
                "route on the CPU and give topk_ids and topk_weights"
            )
