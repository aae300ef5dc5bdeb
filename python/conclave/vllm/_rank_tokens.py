"""Numbers of tokens that ranks bring, as a caller or an engine gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from conclave import _conclave, _limits
from conclave.errors import ConclaveValueError
from conclave.vllm.parallel import FusedMoEParallelConfig

NAME = "rank_tokens"


def counts_of_groups(
    groups: Sequence[_conclave.Communicator], given: Any, own: int
) -> list[list[int]]:
    """For each group through which tokens move, the numbers that its ranks bring. Ranks of the
    first group are side by side in the list; each later one brings what those before have gathered.

    Args:
        given: a list, or an array of the CPU, of one number for each rank. own: this rank's.

    Raises:
        ConclaveTypeError, ConclaveValueError: where there is not one number for each rank, one is
            none, or this rank's is not its own.
    """
    sizes = [group.size for group in groups]
    steps = [math.prod(sizes[:axis]) for axis in range(len(sizes) + 1)]
    counts = _limits.counts(NAME, given, steps[-1])
    at = sum(group.rank * step for group, step in zip(groups, steps, strict=False))
    if counts[at] != own:
        raise ConclaveValueError(
            f"{NAME}: expected {own} for rank {at}, this one, as hidden_states has rows, found "
            f"{counts[at]}"
        )
    found: list[list[int]] = []
    for axis, size in enumerate(sizes):
        step = steps[axis]
        first = at // steps[axis + 1] * steps[axis + 1]
        found.append(
            [sum(counts[first + rank * step : first + (rank + 1) * step]) for rank in range(size)]
        )
    return found


def check_own_tokens(split: FusedMoEParallelConfig, given: Any, own: int) -> None:
    """Of a layer without groups: where an engine moves the tokens of several ranks, their numbers
    are its business."""
    apart = max(split.dp_size * split.pcp_size, split.sp_size)
    if apart > 1:
        raise ConclaveValueError(
            f"{NAME}: expected None, as no groups were given through which {apart} ranks would "
            "exchange tokens"
        )
    counts_of_groups([], given, own)
