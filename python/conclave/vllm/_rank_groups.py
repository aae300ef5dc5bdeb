"""A layer's ranks by the engine's groups: rows go to the ranks that need them, sums come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conclave import _conclave
from conclave._process_groups import communicator_of
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, from_code
from conclave.vllm._checks import check_tokens
from conclave.vllm._rank_split import AXES, place_of
from conclave.vllm._rank_tokens import counts_of_groups
from conclave.vllm._row_bytes import bytes_of_rows, rows_of_bytes
from conclave.vllm.parallel import FusedMoEParallelConfig

_GATHERING = ("naive", "allgather_reducescatter")
_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_MISMATCH = (702, "kCommMismatch")
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RankGroups:
    """What the ranks of one layer do together.

    Ranks of dp and pcp, and with sequence parallelism those of tp, have tokens of their own: rows,
    weights and ids of all of them are gathered, the experts' rows are added in rank order, and each
    rank gets its own. The ranks of tp otherwise have the same tokens, and add up what is left.

    Args:
        split: the layer's. given: by axis, the group or None. adds_up: whether sums over tp are
            this layer's business.
    """

    def __init__(self, split: FusedMoEParallelConfig, given: dict[str, Any], adds_up: bool) -> None:
        ranks = split.tp_size * split.ep_size
        rank = split.ep_rank if split.use_ep else split.tp_rank
        apart = split.dp_size * split.pcp_size
        if ranks % apart != 0:
            raise ConclaveValueError(
                f"moe_parallel_config: expected ranks of dp {split.dp_size} and pcp "
                f"{split.pcp_size} among those of the split, found {ranks} in all"
            )
        tensor_ranks = ranks // apart
        self._places = {
            "tp": (tensor_ranks, rank % tensor_ranks),
            "pcp": (split.pcp_size, split.pcp_rank),
            "dp": (split.dp_size, split.dp_rank),
            "ep": (ranks, rank),
        }
        if given["ep"] is not None and ranks > 1 and not split.use_ep:
            raise ConclaveValueError("ep_group: expected None without expert parallelism")
        self._check_mover(split, apart)
        self._given = given
        self._groups = {axis: self._connected(axis, given[axis]) for axis in AXES}
        self._movers = self._ranks_with_other_tokens(split)
        self._adder: _conclave.Communicator | None = None
        # The first of the ranks whose results are still to be added up.
        self.leads_sum = True
        if not split.is_sequence_parallel:
            self.leads_sum = rank % tensor_ranks == 0
            if adds_up and tensor_ranks > 1:
                self._adder = self._needed("tp", "ep" if apart == 1 else None)

    @staticmethod
    def make(
        split: FusedMoEParallelConfig, given: dict[str, Any], adds_up: bool
    ) -> RankGroups | None:
        """None where no group is given: moving tokens and adding up is then the engine's."""
        if all(group is None for group in given.values()):
            return None
        return RankGroups(split, given, adds_up)

    @staticmethod
    def _check_mover(split: FusedMoEParallelConfig, apart: int) -> None:
        moves = apart > 1 or split.is_sequence_parallel
        if moves and split.all2all_backend not in _GATHERING:
            raise ConclaveUnsupportedError(
                f"all2all_backend: {split.all2all_backend!r} is a library of GPUs; over groups "
                f"rows move by {' or '.join(_GATHERING)}"
            )

    def _connected(self, axis: str, given: Any) -> _conclave.Communicator | None:
        size, rank = self._places[axis]
        if given is None:
            return None
        place = place_of(given, axis)
        if place != (size, rank):
            raise ConclaveValueError(
                f"{axis}_group: expected rank {rank} of {size}, as in the split, found rank "
                f"{place[1]} of {place[0]}"
            )
        return communicator_of(given, f"{axis}_group") if size > 1 else None

    def _needed(self, axis: str, other: str | None = None) -> _conclave.Communicator:
        found = self._groups[axis] or (self._groups[other] if other else None)
        if found is None:
            raise ConclaveValueError(
                f"{axis}_group: expected the group of {self._places[axis][0]} ranks, found None"
            )
        return found

    def _ranks_with_other_tokens(
        self, split: FusedMoEParallelConfig
    ) -> list[_conclave.Communicator]:
        if split.is_sequence_parallel:
            return [self._needed("ep")] if self._places["ep"][0] > 1 else []
        axes = [axis for axis in ("pcp", "dp") if self._places[axis][0] > 1]
        if any(self._groups[axis] is None for axis in axes) and self._places["tp"][0] == 1:
            return [self._needed(axes[0], "ep")]
        return [self._needed(axis) for axis in axes]

    @property
    def whole_group(self) -> _conclave.Communicator | None:
        """The ranks of the split, where one of the groups given has all of them."""
        size = self._places["ep"][0]
        found = (group for group in self._groups.values() if group and group.size == size)
        return next(found, None)

    @property
    def given_whole_group(self) -> Any:
        """The same as it was given, from which other communicators can be made."""
        own = self.whole_group
        found = (axis for axis, group in self._groups.items() if group is own and own is not None)
        axis = next(found, None)
        return None if axis is None else self._given[axis]

    @property
    def moves_tokens(self) -> bool:
        """Whether other ranks have other tokens, which experts here compute too."""
        return bool(self._movers)

    def tokens_across_dp(self, told: Any) -> Any:
        """What an engine says of its dp ranks, where these are all that bring tokens of their own;
        None where ranks have to ask."""
        size = self._places["dp"][0]
        return told if size > 1 and [group.size for group in self._movers] == [size] else None

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroups:
        """The same: a copy of a layer runs on the ranks of the layer."""
        return self

    def run(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        experts: Experts,
        rank_tokens: Sequence[int] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What experts(rows, weights, ids), float32, make of this rank's rows on all ranks that
        have other tokens: [T, H] float32. With rank_tokens, the numbers of tokens of all of these
        in the order of their ranks, they do not ask each other."""
        check_tokens(rows, weights, ids)
        told: Sequence[list[int] | None] = [None] * len(self._movers)
        if rank_tokens is not None:
            told = counts_of_groups(self._movers, rank_tokens, len(rows))
        all_counts = []
        for group, known in zip(self._movers, told, strict=True):
            rows, weights, ids, counts = _gather(group, rows, weights, ids, known)
            all_counts.append(counts)
        out = experts(rows, weights, ids)
        for group, counts in zip(reversed(self._movers), reversed(all_counts), strict=True):
            out = _scatter_sums(group, out, counts)
        return out

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of rows over the ranks that have the same tokens, float32, in rank order; the
        rows where it is not this layer's business."""
        if self._adder is None:
            return rows
        _check_memory(rows)
        mine = rows.detach().float().contiguous().flatten()
        total = torch.empty_like(mine)
        self._adder.all_reduce(mine, total, "reduce_results")
        return total.reshape(rows.shape)


def _check_memory(rows: torch.Tensor) -> None:
    if rows.device.type != "cpu":
        raise ConclaveUnsupportedError(
            f"hidden_states: over groups rows are exchanged in memory of the CPU, found "
            f"{rows.device}; sum what forward returns without groups"
        )


def _gather(
    group: _conclave.Communicator,
    rows: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    known: list[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """All ranks' tokens in rank order, and the number of each rank's."""
    _check_memory(rows)
    counts = _agreed_counts(group, rows, ids) if known is None else known
    parts = [rows, weights.detach().float(), ids.to(torch.int64)]
    mine = torch.cat([bytes_of_rows(part) for part in parts], dim=1)
    width = mine.shape[1]
    if known is None:
        gathered = torch.empty((sum(counts), width), dtype=torch.uint8)
        sizes = [count * width for count in counts]
        group.all_gather(mine.flatten(), gathered.flatten(), sizes, "dispatch")
    else:
        gathered = _gather_announced(group, mine, counts, _rule_of(rows, ids))
    found, begin = [], 0
    for part in parts:
        end = begin + part.shape[1] * part.element_size()
        found.append(rows_of_bytes(gathered, begin, end, part.dtype))
        begin = end
    return found[0], found[1], found[2].to(ids.dtype), counts


def _gather_announced(
    group: _conclave.Communicator, mine: torch.Tensor, counts: list[int], rule: list[int]
) -> torch.Tensor:
    """The same rows where nobody has asked for numbers: each rank's rule goes before its rows, as
    rows of another type may have as many bytes. Lists that differ are other sizes of messages."""
    width, head = mine.shape[1], 8 * len(rule)
    sizes = [head + count * width for count in counts]
    sent = torch.cat([torch.tensor(rule).view(torch.uint8), mine.flatten()])
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    group.all_gather(sent, received, sizes, "dispatch")
    messages = received.split(sizes)
    _check_rules(group, [m[:head].clone().view(torch.int64).tolist() for m in messages], rule)
    return torch.cat([message[head:] for message in messages]).reshape(-1, width)


def _agreed_counts(
    group: _conclave.Communicator, rows: torch.Tensor, ids: torch.Tensor
) -> list[int]:
    """Each rank's number of tokens. Every rank raises where their rows differ in size or type."""
    mine = [len(rows), *_rule_of(rows, ids)]
    told = torch.empty(len(mine) * group.size, dtype=torch.int64)
    group.all_gather(torch.tensor(mine), told, None, "dispatch")
    all_told = told.reshape(group.size, len(mine)).tolist()
    _check_rules(group, [other[1:] for other in all_told], mine[1:])
    return [int(other[0]) for other in all_told]


def _rule_of(rows: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """What ranks must have in common to exchange these rows."""
    return [rows.shape[1], ids.shape[1], _TYPES.get(rows.dtype, 0)]


def _check_rules(group: _conclave.Communicator, told: list[list[int]], mine: list[int]) -> None:
    for rank, other in enumerate(told):
        if other != mine:
            text = (
                f"rank {rank}, phase dispatch: rank {rank} brings rows of {_rule(other)} where "
                f"rank {group.rank} brings rows of {_rule(mine)}"
            )
            raise from_code(*_MISMATCH, text, "", "hidden_states", "", "", "", "")


def _rule(told: list[int]) -> str:
    names = {code: str(dtype).removeprefix("torch.") for dtype, code in _TYPES.items()}
    return f"{told[0]} {names.get(told[2], 'other')} columns and {told[1]} experts a token"


def _scatter_sums(
    group: _conclave.Communicator, rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """This rank's part of the sums over all ranks of rows [sum of counts, H] float32."""
    width, own = rows.shape[1], counts[group.rank]
    parts = torch.empty((group.size, own, width), dtype=torch.float32)
    group.all_to_all(
        rows.contiguous().flatten(),
        [count * width for count in counts],
        parts.flatten(),
        [own * width] * group.size,
        "combine",
    )
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
