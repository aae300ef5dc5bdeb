"""Which experts get replicas, and which rank holds what, from the rows that each expert had."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from conclave import _conclave, _limits
from conclave.errors import ConclaveValueError
from conclave.spec import ParallelSpec, from_dict, to_dict

_MOST = 2**31 - 1

Array = Any


@dataclasses.dataclass(frozen=True)
class ExpertSlots:
    """What each rank holds: rank r has slots first_of[r] to first_of[r + 1] - 1."""

    num_experts: int
    logical_of: tuple[int, ...]  # the expert of each slot, rank by rank
    first_of: tuple[int, ...]  # [ranks + 1]

    @property
    def num_ranks(self) -> int:
        return len(self.first_of) - 1

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The experts of a rank's slots."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank: expected 0 to {self.num_ranks - 1}, found {rank}")
        return self.logical_of[self.first_of[rank] : self.first_of[rank + 1]]

    def survives_any_rank(self) -> bool:
        """Whether every expert is on two ranks at least."""
        return _conclave.survives_any_rank(*self._parts())

    def parallel(self, parallel: ParallelSpec | None = None, **fields: Any) -> ParallelSpec:
        """The split of a layer with these slots: `parallel` (by default one of `fields`, such as
        ep_rank) with their placement. Experts keep their numbers; replicas come behind them."""
        given = ParallelSpec(**fields) if parallel is None else parallel
        return from_dict(ParallelSpec, _conclave.with_slots(to_dict(given), *self._parts()))

    def _parts(self) -> tuple[int, list[int], list[int]]:
        return self.num_experts, list(self.logical_of), list(self.first_of)


def _parts_of(argument: str, slots: Any) -> tuple[int, list[int], list[int]]:
    return _limits.instance(argument, slots, ExpertSlots, "ExpertSlots")._parts()


def balance_rules() -> list[str]:
    """The names of rules for `balance_experts`."""
    return _conclave.balance_rules()


def balance_experts(
    load: Array,
    *,
    num_ranks: int,
    num_redundant_experts: int = 0,
    rule: str = "hierarchical",
    num_nodes: int = 1,
    num_groups: int = 1,
    previous: ExpertSlots | Sequence[int] | None = None,
    distinct_ranks: bool = True,
    least_gain: float = 0.01,
) -> ExpertSlots:
    """The slots for experts that had load[e] rows.

    Args:
        load: [E] rows of each expert, as `Layer.stats` counts them, of any window, without padding.
        num_ranks: ranks over which E + num_redundant_experts slots are spread; the first ones hold
            one more where they do not divide evenly.
        rule: "hierarchical", DeepSeek's with groups and nodes; "global", without; "surviving",
            global with each expert on two ranks at least; "steady", which begins with `previous`
            and moves few experts.
        num_nodes, num_groups: of the ranks, which are numbered node by node, and of the experts.
        previous: what the slots of the same ranks hold now. Experts that stay on their rank keep
            their slots.
        distinct_ranks: replicas of an expert lie on different ranks where there are enough. False:
            exactly what DeepSeek's functions give.
        least_gain: for steady, the part of the busiest rank's load that a move must take away.

    Raises:
        ConclaveValueError: for loads that are not finite, negative or all zero, and whatever else
            has no meaning, by the argument's name.
    """
    before = previous.logical_of if isinstance(previous, ExpertSlots) else previous
    rows = _limits.reals("load", load)
    logical_of, first_of = _conclave.balance_experts(
        rows,
        _limits.text("rule", rule),
        _limits.integer("num_ranks", num_ranks, -_MOST, _MOST),
        _limits.integer("num_redundant_experts", num_redundant_experts, -_MOST, _MOST),
        _limits.integer("num_nodes", num_nodes, -_MOST, _MOST),
        _limits.integer("num_groups", num_groups, -_MOST, _MOST),
        [] if before is None else _limits.integers("previous", before, 0, _MOST),
        _limits.flag("distinct_ranks", distinct_ranks),
        _limits.real("least_gain", least_gain),
    )
    return ExpertSlots(len(rows), tuple(logical_of), tuple(first_of))


def spread_over(before: ExpertSlots, old_ranks: Sequence[int]) -> ExpertSlots:
    """The slots of a layer on other ranks: rank r of them was old_ranks[r], or -1 joins with
    nothing. Every expert keeps its number of replicas, at most one on a rank; ranks hold equally
    many, or one more, and as few experts as possible change their rank.

    Raises:
        ConclaveValueError: for ranks that there are not, or that are named twice.
    """
    num_experts, logical_of, first_of = _conclave.spread_over(
        *_parts_of("before", before), _limits.integers("old_ranks", old_ranks, -1, _MOST)
    )
    return ExpertSlots(num_experts, tuple(logical_of), tuple(first_of))


def balancedness(load: Array, slots: ExpertSlots) -> float:
    """The mean over ranks of the rows that each would have had, over the largest: 1 is perfect."""
    return _conclave.balancedness(_limits.reals("load", load), *_parts_of("slots", slots))


def moved_experts(before: ExpertSlots, after: ExpertSlots) -> int:
    """Slots whose expert was not on their rank before: as many experts travel."""
    _, old, old_first = _parts_of("before", before)
    num_experts, new, first = _parts_of("after", after)
    if old_first != first:
        raise ConclaveValueError("moved_experts: the two have other ranks or numbers of slots")
    return _conclave.moved_experts(num_experts, old, new, first)
