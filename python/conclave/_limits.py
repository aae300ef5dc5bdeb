"""Limits of a call's choices, as Python callers write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

Array = Any


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
        if isinstance(expert, bool) or not hasattr(expert, "__index__"):
            raise ConclaveTypeError(
                f"banned_experts: expected ids, or an array of bools, found {expert!r}"
            )
        index = int(expert)
        if not 0 <= index < columns:
            raise ConclaveValueError(
                f"banned_experts: expected ids of 0 to {columns - 1}, found {index}"
            )
        flags[index] = 1
    return memoryview(flags).cast("B").cast("?")


def integer(name: str, value: Any, low: int, high: int) -> int:
    """The value of an argument that is an integer between two others.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument and its limits.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConclaveTypeError(f"{name}: expected an integer, found {type(value).__name__}")
    number = int(value)
    if not low <= number <= high:
        raise ConclaveValueError(f"{name}: expected {low} to {high}, found {number}")
    return number


def refuse(top_k: int | None, banned: Any, expert_budget: int | None) -> None:
    """Raises ConclaveUnsupportedError if a call on a GPU has limits."""
    for name, value in (
        ("top_k", top_k),
        ("banned_experts", banned),
        ("expert_budget", expert_budget),
    ):
        if value is not None:
            raise ConclaveUnsupportedError(
                f"{name}: routers on a GPU do not know limits of a call; route with these limits "
                "on the CPU and give topk_ids and topk_weights"
            )
