"""Grouping of (token, slot) pairs by expert, for programs with expert kernels of their own.

`Layer` and `fused_experts` do not need these: they gather rows inside their kernels. Slots of an
expert keep their order, the same on every run. Tensors on a GPU stay there; nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conclave import _conclave, _device_permute, _frameworks, _gradients, _limits
from conclave.errors import ConclaveTypeError, ConclaveValueError

Array = Any

_MOST_ROWS = 2**31 - 1
_MOST_EXPERTS = 2**24  # as placements have


def _check_map(expert_map: Array | Sequence[int] | None, num_experts: int) -> None:
    if expert_map is None:
        return
    if isinstance(expert_map, (str, bytes)) or not hasattr(expert_map, "__len__"):
        raise ConclaveTypeError(
            f"expert_map: expected a list or an array, found {type(expert_map).__name__}"
        )
    if len(expert_map) != num_experts:
        raise ConclaveValueError(
            f"expert_map: expected {num_experts} entries, found {len(expert_map)}"
        )


def _local_of(expert_map: Array | Sequence[int] | None) -> list[int]:
    if expert_map is None:
        return []
    entries = list(expert_map.tolist() if hasattr(expert_map, "tolist") else expert_map)
    if any(type(entry) is not int for entry in entries):
        return [_limits.integer("expert_map", entry, -1, _MOST_ROWS) for entry in entries]
    return entries


def _check_ids(topk_ids: Array) -> tuple[int, int]:
    return _limits.matrix_shape("topk_ids", topk_ids, "shape [T, top_k]")


def _num_local(num_experts: int, n_local_expert: int, local_of: Sequence[int]) -> int:
    held = max(local_of, default=-1) + 1 if local_of else num_experts
    if n_local_expert >= 0 and n_local_expert < held:
        raise ConclaveValueError(
            f"n_local_expert: expected at least {held} as in expert_map, found {n_local_expert}"
        )
    return n_local_expert if n_local_expert >= 0 else held


def moe_align_block_size(
    topk_ids: Array,
    block_size: int,
    num_experts: int,
    expert_map: Array | Sequence[int] | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Array, Array, Array]:
    """Sorts slots by expert and pads each expert to whole blocks (vLLM's function).

    Args:
        topk_ids: [T, k] int32 or int64; ids outside [0, num_experts) are left out.
        block_size: rows of a block.
        expert_map: [num_experts], the local index of each expert, -1 for those of other ranks.
        pad_sorted_ids: round the length of sorted_token_ids up to whole blocks.
        ignore_invalid_experts: leave out slots of other ranks' experts; by default they are sorted
            with the rest, in blocks whose expert is -1.

    Returns:
        sorted_token_ids [P] int32: t * k + j, and T * k where a block is padded; expert_ids
        [ceil(P / block_size)] int32: the (local) expert of each block, -1 for none and behind the
        end; num_tokens_post_padded [1] int32: the end. P = T k + num_experts (block_size - 1), at
        most T k blocks.
    """
    tokens, top_k = _check_ids(topk_ids)
    num_experts = _limits.integer("num_experts", num_experts, 1, _MOST_EXPERTS)
    _check_map(expert_map, num_experts)
    block_size = _limits.integer("block_size", block_size, 1, _MOST_ROWS)
    slots = tokens * top_k
    padded = slots + num_experts * (block_size - 1)
    if pad_sorted_ids:
        padded = -(-padded // block_size) * block_size
    padded = min(padded, slots * block_size) if slots < num_experts else padded
    blocks = -(-padded // block_size)
    if _frameworks.device_of(topk_ids) != "cpu":
        return _device_permute.align_block_size(
            topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts, padded, blocks
        )
    local_of = _local_of(expert_map)
    sorted_ids = _frameworks.empty_like(topk_ids, (padded,), "int32", "sorted_token_ids")
    expert_ids = _frameworks.empty_like(topk_ids, (blocks,), "int32", "expert_ids")
    end = _frameworks.empty_like(topk_ids, (1,), "int32", "num_tokens_post_padded")
    end[0] = _conclave.align_block_size(
        topk_ids,
        block_size,
        num_experts,
        local_of,
        not ignore_invalid_experts,
        sorted_ids,
        expert_ids,
    )
    return sorted_ids, expert_ids, end


def moe_permute(
    hidden_states: Array,
    a1q_scale: Array | None,
    topk_ids: Array,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Array | Sequence[int] | None = None,
    permuted_hidden_states: Array | None = None,
) -> tuple[Array, Array | None, Array, Array, Array]:
    """One row for each slot, grouped by expert (vLLM's function).

    Args:
        hidden_states: [T, H]. a1q_scale: [T, ...] scales of its rows, which go along; or None.
        topk_ids: [T, k] int32 or int64.
        n_expert: E. n_local_expert: experts of this rank; by default those of expert_map, or all.
        expert_map: [E], the local index of each expert, -1 for those of other ranks.
        permuted_hidden_states: [T * k, H] to write to; by default new memory.

    Returns:
        permuted_hidden_states [T * k, H]: rows of expert 0, then 1, ...; then zeros for slots
        without a local expert; the scales of these rows, or None; expert_first_token_offset
        [n_local_expert + 1] int64; inv_permuted_idx [T * k] int32: the row of each slot;
        permuted_idx [T * k] int32: the slot of each row, T * k where there is none.
    """
    tokens, top_k = _check_ids(topk_ids)
    n_expert = _limits.integer("n_expert", n_expert, 1, _MOST_EXPERTS)
    n_local_expert = _limits.integer("n_local_expert", n_local_expert, -1, _MOST_EXPERTS)
    _check_map(expert_map, n_expert)
    _, width = _limits.matrix_shape("hidden_states", hidden_states, "shape [T, H]")
    _gradients.refuse(
        {
            "hidden_states": hidden_states,
            "a1q_scale": a1q_scale,
            "permuted_hidden_states": permuted_hidden_states,
        }
    )
    slots = tokens * top_k
    on_device = _frameworks.device_of(topk_ids) != "cpu"
    # A map in the device's memory is read by the host only where its size is not said.
    unread = on_device and n_local_expert >= 0
    local_of = [] if unread else _local_of(expert_map)
    num_local = n_local_expert if unread else _num_local(n_expert, n_local_expert, local_of)
    rows = permuted_hidden_states
    if rows is None:
        rows = _frameworks.empty_like(hidden_states, (slots, width), None, "permuted_hidden_states")
    if on_device:
        return _device_permute.permute(
            hidden_states, a1q_scale, topk_ids, n_expert, num_local, expert_map, rows
        )
    first = _frameworks.empty_like(topk_ids, (num_local + 1,), "int64", "offsets")
    inverse = _frameworks.empty_like(topk_ids, (slots,), "int32", "inv_permuted_idx")
    index = _frameworks.empty_like(topk_ids, (slots,), "int32", "permuted_idx")
    count = _conclave.permute(
        hidden_states, topk_ids, n_expert, local_of, rows, first, index, inverse
    )
    held = max(local_of, default=-1) + 1 if local_of else n_expert
    first[held + 1 :] = count
    if a1q_scale is not None and len(a1q_scale.shape) > 1 and top_k > 0:
        source = index.clip(max=max(slots - 1, 0)) // top_k
        a1q_scale = a1q_scale[source]
    return rows, a1q_scale, first, inverse, index


def moe_unpermute(
    out: Array,
    permuted_hidden_states: Array,
    topk_weights: Array,
    inv_permuted_idx: Array,
    expert_first_token_offset: Array | None = None,
) -> None:
    """Writes the weighted sum of each token's rows to `out` (vLLM's function).

    Sums run over slots in order, in float32, and are rounded once.

    Args:
        out: [T, H] float32, float16 or bfloat16.
        permuted_hidden_states: [N, H] of such a type.
        topk_weights: [T, k] float32. inv_permuted_idx: [T * k] (or [T, k]) int32.
        expert_first_token_offset: rows from its last entry on belong to no local expert and
            contribute nothing; None: all rows count.
    """
    _gradients.refuse(
        {
            "out": out,
            "permuted_hidden_states": permuted_hidden_states,
            "topk_weights": topk_weights,
        }
    )
    rows, _ = _limits.matrix_shape("permuted_hidden_states", permuted_hidden_states, "shape [N, H]")
    if not hasattr(inv_permuted_idx, "reshape"):
        raise ConclaveTypeError(
            f"inv_permuted_idx: expected an array, found {type(inv_permuted_idx).__name__}"
        )
    if _frameworks.device_of(out) != "cpu":
        _device_permute.unpermute(
            out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
        )
        return
    if expert_first_token_offset is not None:
        rows = int(expert_first_token_offset[-1])
    _conclave.unpermute(
        permuted_hidden_states, inv_permuted_idx.reshape(-1), topk_weights, out, rows
    )
