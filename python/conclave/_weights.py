"""Weights that a caller passes as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from conclave import _frameworks, _gradients, _limits
from conclave.errors import ConclaveTypeError

_MOST_EXPERTS = 2**31 - 1


class ArrayForm(NamedTuple):
    """How arrays hold the experts of a layer, as checked arguments."""

    orders: tuple[str, str]  # of gate's and up's rows, of routed and of shared experts
    transposed: bool
    local_of: list[int]  # the index of each expert in the arrays; empty: they have all


def checked_form(
    gate_up_order: Any, shared_gate_up_order: Any, transposed: Any, expert_map: Any
) -> ArrayForm:
    """The arguments of these names.

    Raises:
        ConclaveTypeError, ConclaveValueError: naming the argument.
    """
    local_of = []
    if expert_map is not None:
        local_of = _limits.integers("expert_map", expert_map, -1, _MOST_EXPERTS)
    orders = (
        _limits.text("gate_up_order", gate_up_order),
        _limits.text("shared_gate_up_order", shared_gate_up_order),
    )
    return ArrayForm(orders, _limits.flag("transposed", transposed), local_of)


def given_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that there are, finished on their device. Raises where autograd would expect
    gradients of them, which no forward computes."""
    found = {name: value for name, value in weights.items() if value is not None}
    _gradients.refuse(found)
    for value in found.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        _frameworks.synchronize(first)
    return found


def refuse_beside(
    what: str, arguments: Mapping[str, Any], usual: Mapping[str, Any] | None = None
) -> None:
    """Raises for an argument that nobody would read.

    Args:
        what: beside which it has no meaning: "a checkpoint".
        arguments: by name, None where they were left out.
        usual: what others are where they were left out.
    """
    left_out = usual or {}
    for name, value in arguments.items():
        if value is None or (name in left_out and value == left_out[name]):
            continue
        raise ConclaveTypeError(
            f"{name}: expected none beside {what}, found {type(value).__name__}"
        )


def refuse_form(
    gate_up_order: Any, shared_gate_up_order: Any, transposed: Any, expert_map: Any
) -> None:
    """Raises where these say how arrays lie, beside a checkpoint that has none."""
    given = {
        "gate_up_order": gate_up_order,
        "shared_gate_up_order": shared_gate_up_order,
        "transposed": transposed,
        "expert_map": expert_map,
    }
    concatenated = "concatenated"
    refuse_beside(
        "a checkpoint",
        given,
        {"gate_up_order": concatenated, "shared_gate_up_order": concatenated, "transposed": False},
    )
