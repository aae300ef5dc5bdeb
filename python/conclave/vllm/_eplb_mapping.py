"""Ranks that leave or join while experts move: a table from old ranks to new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from conclave.errors import ConclaveTypeError, ConclaveValueError


class RankMapping(NamedTuple):
    """Where each old rank is among the new ones. Those that move experts are the larger of both
    groups."""

    new_of: tuple[int, ...]  # by old rank, -1 for one that leaves
    num_new: int

    @property
    def num_old(self) -> int:
        return len(self.new_of)

    @property
    def grows(self) -> bool:
        return self.num_old < self.num_new

    @staticmethod
    def of(rank_mapping: Any, size: int) -> RankMapping:
        """Of ranks that leave a group of `size` ranks, where it names all of these, or of ranks
        that were there before others joined, where it names fewer.

        Raises:
            ConclaveTypeError, ConclaveValueError: naming what does not fit.
        """
        if not hasattr(rank_mapping, "items"):
            raise ConclaveTypeError(
                f"rank_mapping: expected a dict of ranks, found {type(rank_mapping).__name__}"
            )
        given = {int(old): int(new) for old, new in rank_mapping.items()}
        if not given or sorted(given) != list(range(len(given))) or len(given) > size:
            raise ConclaveValueError(
                f"rank_mapping: expected ranks 0 to at most {size - 1}, each once, found "
                f"{sorted(given)}"
            )
        new_of = tuple(given[old] for old in range(len(given)))
        stay = sorted(new for new in new_of if new != -1)
        num_new = len(stay) if len(given) == size else size
        joins = len(given) < size
        is_whole = stay == list(range(num_new)) if not joins else len(set(stay)) == len(new_of)
        if not stay or not is_whole or not all(0 <= new < num_new for new in stay):
            raise ConclaveValueError(
                f"rank_mapping: expected new ranks 0 to {num_new - 1 if stay else size - 1}, each "
                f"once, or -1 for one that leaves, found {list(new_of)}"
            )
        return RankMapping(new_of, num_new)

    def slots_before(self, old: Sequence[int]) -> list[int]:
        """Slots of the old ranks, as the larger group has them: none where a rank has joined."""
        return self.of_stayers(old) if self.grows else list(old)

    def slots_after(self, new: Sequence[int]) -> list[int]:
        """Slots of the new ranks, as the larger group has them: none where a rank leaves."""
        if self.grows:
            return list(new)
        width = self._width("new_global_expert_indices", new, self.num_new)
        found: list[int] = []
        for place in self.new_of:
            found += new[place * width : (place + 1) * width] if place >= 0 else [-1] * width
        return found

    def of_stayers(self, old: Sequence[int]) -> list[int]:
        """Slots of before of the ranks that stay, in the order of the new ones."""
        width = self._width("old_global_expert_indices", old, self.num_old)
        found = [-1] * (width * self.num_new)
        for rank, new in enumerate(self.new_of):
            if new >= 0:
                found[new * width : (new + 1) * width] = old[rank * width : (rank + 1) * width]
        return found

    @staticmethod
    def _width(name: str, slots: Sequence[int], ranks: int) -> int:
        if not slots or len(slots) % ranks:
            raise ConclaveValueError(
                f"{name}: expected slots that divide by {ranks} ranks, found {len(slots)}"
            )
        return len(slots) // ranks
