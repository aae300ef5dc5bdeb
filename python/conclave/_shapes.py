"""Sizes of a layer from the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave, _frameworks
from conclave.errors import ConclaveTypeError

# Codes of half a byte that an element holds, by the type of the array.
_CODES = {"uint8": 2, "int32": 8, "uint32": 8}


def _is_half_byte(dtype: Any) -> bool:
    return _conclave.element_bits(str(dtype).removeprefix("torch.")) == 4


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


def as_loaded(
    weights: dict[str, Any],
    orders: tuple[str, str],
    transposed: bool,
    spec: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[str, str]]:
    """Weights and the orders of their rows, of routed and shared experts, as they can be loaded
    from where they lie."""
    found = list(orders)
    by_row = scales_by_row(spec.get("quant", {}))
    if _are_on_a_gpu(weights, "") and _is_int8(spec.get("weight_dtype")):
        weights = {name: _in_signed_bytes(name, array) for name, array in weights.items()}
    for i, prefix in enumerate(("", "shared_")):
        if orders[i] == "interleaved" and _are_on_a_gpu(weights, prefix):
            turned = transposed and not prefix
            weights = separate_rows(weights, prefix, turned, by_row)
            found[i] = "concatenated"
    return weights, (found[0], found[1])


def _is_int8(dtype: Any) -> bool:
    return str(dtype).removeprefix("torch.") in ("int8", "I8")


def _in_signed_bytes(name: str, array: Any) -> Any:
    """A copy of matrices whose bytes are 128 more than their values; all else as it is."""
    if name not in ("gate_up", "gate", "up", "down") or isinstance(array, (list, tuple)):
        return array
    return _frameworks.as_signed_bytes(array) if _frameworks.dtype_name(array) == "uint8" else array


def _are_on_a_gpu(weights: Mapping[str, Any], prefix: str) -> bool:
    """Whether the gate and up rows of these experts are memory of a GPU."""
    for name in ("gate_up", "gate_up_bias", "gate_up_scale", "gate_up_zero"):
        array = weights.get(prefix + name)
        if isinstance(array, (list, tuple)):
            array = array[0] if array else None
        if array is not None:
            return _frameworks.device_of(array) != "cpu"
    return False


def device_of_experts(weights: Mapping[str, Any]) -> str | None:
    """Where the experts' matrices lie."""
    for name in ("gate_up", "up", "down"):
        array = weights.get(name)
        if isinstance(array, (list, tuple)):
            array = array[0] if array else None
        if array is not None:
            device = _frameworks.device_of(array)
            return device if device != "cpu" else None
    return None
