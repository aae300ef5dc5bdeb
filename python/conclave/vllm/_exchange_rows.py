"""Rows of ranks on their way: whose they are, their bytes, and what ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conclave import _conclave
from conclave.errors import ConclaveValueError, Error, from_code
from conclave.vllm._row_bytes import bytes_of_rows, rows_of_bytes

_MISMATCH = (702, "kCommMismatch")
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def agree_on_counts(
    group: _conclave.Communicator, rule: list[int] | None, counts: list[int], phase: str
) -> list[int]:
    """Rows that come from each rank. Every rank raises where another has an error, or where their
    rows differ in size or type.

    Args:
        rule: what all ranks have in common, as `rule_of` makes it; None: this rank has an error of
            its own to raise.
        counts: rows for each rank.
    """
    mine = rule or [1, 0, 0, 0, 0]
    sent = torch.tensor(mine + counts, dtype=torch.int64)
    told = torch.empty(group.size * len(sent), dtype=torch.int64)
    group.all_gather(sent, told, None, phase)
    all_told = told.reshape(group.size, len(sent)).tolist()
    for rank, other in enumerate(all_told):
        if rule is not None and other[: len(mine)] != mine:
            raise _mismatch(rank, other, mine, phase)
    return [int(other[len(mine) + group.rank]) for other in all_told]


def rule_of(rows: torch.Tensor, ids: torch.Tensor, num_experts: int) -> list[int]:
    """What ranks must have in common to exchange these rows."""
    return [0, rows.shape[1], ids.shape[1], TYPES.index(rows.dtype), num_experts]


def _mismatch(rank: int, theirs: list[int], mine: list[int], phase: str) -> Error:
    text = f"rank {rank}, phase {phase}: "
    if theirs[0]:
        text += "it has refused its arguments"
    else:
        text += f"it brings {_rule(theirs)} where this rank brings {_rule(mine)}"
    return from_code(*_MISMATCH, text, "", "a1", "", "", "", "")


def _rule(told: list[int]) -> str:
    dtype = str(TYPES[told[3]]).removeprefix("torch.")
    return f"{told[1]} columns of {dtype}, {told[2]} of {told[4]} experts a token"


def rank_of_slots(ids: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """The rank of each choice's expert, -1 for the id -1."""
    if bool(((ids < -1) | (ids >= len(owner))).any()):
        raise ConclaveValueError(f"topk_ids: expected ids from -1 to {len(owner) - 1}")
    if len(owner) == 0:
        return torch.full_like(ids, -1, dtype=torch.int64)
    return torch.where(ids >= 0, owner[ids.clamp(min=0).long()], -1)


def packed_rows(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, bytes] uint8: each row with its weights and ids behind it."""
    parts = (rows, weights.detach().float(), ids.to(torch.int64))
    return torch.cat([bytes_of_rows(part) for part in parts], dim=1)


def unpacked_rows(
    packed: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights and ids of what others have packed as this rank packs its own."""
    found, begin = [], 0
    for columns, dtype in (
        (rows.shape[1], rows.dtype),
        (ids.shape[1], torch.float32),
        (ids.shape[1], torch.int64),
    ):
        end = begin + columns * dtype.itemsize
        found.append(rows_of_bytes(packed, begin, end, dtype))
        begin = end
    return found[0], found[1], found[2].to(ids.dtype)


def add_sums(
    output: torch.Tensor, sent: list[torch.Tensor], blocks: Sequence[torch.Tensor]
) -> None:
    """Each token's sums, in rank order, rounded once."""
    total = torch.zeros(output.shape, dtype=torch.float32)
    for tokens, block in zip(sent, blocks, strict=True):
        total[tokens] += block.float()
    output.copy_(total)
