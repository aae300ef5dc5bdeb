"""Sizes of a layer from the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveTypeError

# Codes of half a byte that an element holds, by the type of the array.
_CODES = {"uint8": 2, "int32": 8, "uint32": 8}
# Their types, as Python and as files name them.
_HALF_BYTES = ("int4", "I4", "float4_e2m1fn_x2", "F4", "nf4", "NF4", "bnb_fp4", "BNB_FP4")


def _is_half_byte(dtype: Any) -> bool:
    return str(dtype).removeprefix("torch.") in _HALF_BYTES


def scales_by_row(quant: Mapping[str, Any]) -> bool:
    """Whether each row has scales of its own."""
    weights = quant.get("weights", "none")
    return weights == "channel" or (weights == "block" and quant.get("block_rows", 128) == 1)


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
    if down is None and not spec.get("num_experts"):
        raise ConclaveTypeError("down: expected [E, H, I], found nothing")
    sizes = _experts_and_matrix(down)
    if sizes is not None:
        experts, rows, cols = sizes
        first = down[0] if isinstance(down, (list, tuple)) else down
        if _is_half_byte(spec.get("weight_dtype")):
            cols *= _CODES.get(_frameworks.dtype_name(first), 1)
        hidden, inner = (cols, rows) if transposed else (rows, cols)
        if not spec.get("num_experts"):
            spec["num_experts"] = len(expert_map) if expert_map is not None else int(experts)
        if not spec.get("hidden_size"):
            spec["hidden_size"] = int(hidden)
        if not spec.get("intermediate_size"):
            spec["intermediate_size"] = int(inner)
        if "weight_dtype" not in spec:
            spec["weight_dtype"] = _frameworks.dtype_name(first)
    if "has_gate" not in spec:
        spec["has_gate"] = weights.get("router") is not None
    return spec


def _every_other(array: Any, first: int, axis: int) -> Any:
    """Views of the gate's (first 0) or of up's (1) rows of interleaved matrices."""
    if isinstance(array, (list, tuple)):
        return [_every_other(matrix, first, axis) for matrix in array]
    index = [slice(None)] * len(array.shape)
    index[axis] = slice(first, None, 2)
    return array[tuple(index)]


def _vectors_separated(vectors: Any, rows: int) -> Any:
    """Vectors of one number a row, all of the gate before all of up."""
    shape = tuple(vectors.shape)
    if rows not in shape:
        return vectors  # one scale for all; or wrong, which the extension module says
    axis = 1 if len(shape) > 1 and shape[1] == rows else shape.index(rows)
    halves = [_every_other(vectors, first, axis) for first in (0, 1)]
    return _frameworks.concatenate(halves, axis)


def separate_rows(
    weights: Mapping[str, Any], prefix: str, transposed: bool, by_row: bool
) -> dict[str, Any]:
    """Weights with interleaved gate and up, in concatenated order. `prefix`: "" or "shared_".

    Matrices become two views. Vectors, whose elements a GPU's loader needs side by side, are small
    and copied. Scales and zeros of several rows are in that order already.
    """
    separate = dict(weights)
    matrices = separate.pop(f"{prefix}gate_up", None)
    rows = 0
    if matrices is not None:
        axis = -1 if transposed else -2
        first = matrices[0] if isinstance(matrices, (list, tuple)) else matrices
        rows = first.shape[axis]
        separate[f"{prefix}gate"] = _every_other(matrices, 0, axis)
        separate[f"{prefix}up"] = _every_other(matrices, 1, axis)
    for plane in ("bias", "scale", "zero"):
        name = f"{prefix}gate_up_{plane}"
        vectors = separate.get(name)
        if vectors is None or (plane != "bias" and not by_row):
            continue
        separate[name] = _vectors_separated(vectors, rows or vectors.shape[-1])
    return separate
