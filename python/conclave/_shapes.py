"""Sizes of a layer from the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _frameworks


def _experts_and_matrix(array: Any) -> tuple[int, int, int] | None:
    """[E, rows, cols] of a stack, or of a list of matrices."""
    if isinstance(array, (list, tuple)):
        if not array or len(getattr(array[0], "shape", ())) != 2:
            return None
        return (len(array), *array[0].shape)
    shape = tuple(getattr(array, "shape", ()))
    return shape if len(shape) == 3 else None  # type: ignore[return-value]


def complete_spec(
    spec: dict[str, Any],
    weights: Mapping[str, Any],
    transposed: bool,
    expert_map: Sequence[int] | None,
) -> dict[str, Any]:
    """The spec with the sizes, the type and has_gate that it left out.

    What is wrong with the arrays is for the extension module to say.
    """
    down = weights.get("down")
    sizes = _experts_and_matrix(down)
    if sizes is not None:
        experts, rows, cols = sizes
        hidden, inner = (cols, rows) if transposed else (rows, cols)
        if not spec.get("num_experts"):
            spec["num_experts"] = len(expert_map) if expert_map is not None else int(experts)
        if not spec.get("hidden_size"):
            spec["hidden_size"] = int(hidden)
        if not spec.get("intermediate_size"):
            spec["intermediate_size"] = int(inner)
        if "weight_dtype" not in spec:
            first = down[0] if isinstance(down, (list, tuple)) else down
            spec["weight_dtype"] = _frameworks.dtype_name(first)
    if "has_gate" not in spec:
        spec["has_gate"] = weights.get("router") is not None
    return spec


def _every_other(array: Any, first: int, axis: int) -> Any:
    """Views of the gate's (first 0) or of up's (1) rows of interleaved matrices."""
    if isinstance(array, (list, tuple)):
        return [_every_other(matrix, first, axis - 1) for matrix in array]
    return array[(slice(None),) * axis + (slice(first, None, 2),)]


def separate_rows(
    weights: Mapping[str, Any], transposed: bool, channel_scales: bool
) -> dict[str, Any]:
    """Torch weights with interleaved gate and up, in concatenated order.

    Matrices become two views. Vectors, whose elements a GPU's loader needs side by side, are small
    and copied. Scales of blocks are in that order already.
    """
    torch = _frameworks.torch()
    separate = dict(weights)
    matrices = separate.pop("gate_up", None)
    if matrices is not None:
        axis = 2 if transposed else 1
        separate["gate"] = _every_other(matrices, 0, axis)
        separate["up"] = _every_other(matrices, 1, axis)
    for name in ("gate_up_bias", "gate_up_scale"):
        vectors = separate.get(name)
        if vectors is None or (name == "gate_up_scale" and not channel_scales):
            continue
        separate[name] = torch.cat([vectors[:, 0::2], vectors[:, 1::2]], dim=1)
    return separate
