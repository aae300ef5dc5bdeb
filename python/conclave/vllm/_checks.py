"""What `fused_experts` asks of its arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

from conclave import _frameworks
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._formats import PLAIN, WeightFormat, array_type
from conclave.vllm.activation import MoEActivation
from conclave.vllm.quant import FP8, dtype_text

Array = Any


class Sizes(NamedTuple):
    """Of a layer's weights."""

    experts: int
    hidden: int
    inner: int


def _shape(array: Array, argument: str, rank: int, letters: str) -> tuple[int, ...]:
    shape = _frameworks.shape_of(array, argument)
    if len(shape) != rank:
        raise ConclaveValueError(f"{argument}: expected shape {letters}, found {list(shape)}")
    return tuple(int(size) for size in shape)


def check_tokens(hidden_states: Array, topk_weights: Array, topk_ids: Array) -> int:
    """k."""
    tokens, hidden = _shape(hidden_states, "hidden_states", 2, "[T, H]")
    if dtype_text(getattr(hidden_states, "dtype", None)) == FP8:
        raise ConclaveUnsupportedError(
            "hidden_states: rows that are quantised already do not run; give them as they were"
        )
    array_type(hidden_states, "hidden_states", PLAIN)
    strides = _frameworks.strides_of(hidden_states)
    if strides is not None and strides[1] != 1 and tokens > 0 and hidden > 1:
        raise ConclaveValueError(
            f"hidden_states: expected the elements of a row side by side, found strides "
            f"{list(strides)}; give a contiguous copy"
        )
    rows, top_k = _shape(topk_ids, "topk_ids", 2, "[T, k]")
    array_type(topk_ids, "topk_ids", ("int32", "int64"))
    weights = _shape(topk_weights, "topk_weights", 2, "[T, k]")
    array_type(topk_weights, "topk_weights", PLAIN)
    if rows != tokens:
        raise ConclaveValueError(
            f"topk_ids: expected {tokens} rows as in hidden_states, found {rows}"
        )
    if weights != (rows, top_k):
        raise ConclaveValueError(
            f"topk_weights: expected shape {[rows, top_k]} as topk_ids, found {list(weights)}"
        )
    device = _frameworks.device_of(hidden_states)
    for argument, array in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        check_device(array, argument, device)
    return top_k


def check_device(array: Array, argument: str, device: str) -> None:
    found = _frameworks.device_of(array)
    if found != device:
        raise ConclaveValueError(f"{argument}: expected it on {device}, found it on {found}")


def check_weights(w1: Array, w2: Array, kind: MoEActivation, coded: WeightFormat | None) -> Sizes:
    """The sizes of w1 [E, 2N, H] and w2 [E, H, N], whose codes may lie several in an element."""
    experts, rows, _ = _shape(w1, "w1", 3, "[E, 2N, H]")
    held, out_rows, _ = _shape(w2, "w2", 3, "[E, H, N]")
    dtype = array_type(w1, "w1", PLAIN if coded is None else coded.types)
    array_type(w2, "w2", (dtype,))
    check_device(w2, "w2", _frameworks.device_of(w1))
    hidden, inner = (
        int(array.shape[2]) if coded is None else coded.columns(array, name)
        for array, name in ((w1, "w1"), (w2, "w2"))
    )
    expected = 2 * inner if kind.is_gated else inner
    if rows != expected:
        raise ConclaveValueError(
            f"w1: expected {expected} rows for the {inner} columns of w2 and activation "
            f"{kind.value}, found {rows}"
        )
    if held != experts:
        raise ConclaveValueError(f"w2: expected {experts} experts as in w1, found {held}")
    if out_rows != hidden:
        raise ConclaveValueError(f"w2: expected {hidden} rows as w1 has columns, found {out_rows}")
    return Sizes(experts, hidden, inner)


def check_sizes(hidden_states: Array, w1: Array, coded: WeightFormat | None) -> None:
    """Whether rows of hidden states fit the columns of w1."""
    hidden = _shape(w1, "w1", 3, "[E, 2N, H]")[2]
    if coded is not None:
        hidden = coded.columns(w1, "w1")
    if int(hidden_states.shape[1]) != hidden:
        raise ConclaveValueError(
            f"hidden_states: Hidden size mismatch: expected {hidden} columns as in w1, "
            f"found {int(hidden_states.shape[1])}"
        )
    check_device(hidden_states, "hidden_states", _frameworks.device_of(w1))
