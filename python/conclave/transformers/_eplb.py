"""What `patch` is told of experts that follow their load, and where it lets them lie at first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave
from conclave.balance import ExpertSlots, balance_experts, balance_rules
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.spec import ParallelSpec, to_dict
from conclave.transformers._find import Candidate
from conclave.transformers._split import spread_of_experts

_MOST_REDUNDANT = 1023  # as in vLLM
_COUNTS = ("window_size", "step_interval", "log_balancedness_interval", "num_nodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EplbOptions:
    """How the experts of a patched model follow their load, by vLLM's names.

    A placement is of the whole group's ranks. On one rank, and where ranks hold slices of every
    expert, rows are counted and nothing else is done: there are no replicas, and nothing moves.

    Raises:
        ConclaveValueError: naming the field.
    """

    num_redundant_experts: int = 0  # slots beside one for each expert, over all ranks
    window_size: int = 1000  # steps whose rows count, the last ones
    step_interval: int = 3000  # steps from one rebalance to the next, the first after a quarter
    log_balancedness: bool = False  # to the logger "conclave.balancer"
    log_balancedness_interval: int = 1
    use_async: bool = True  # beside forwards, through one spare place a rank; False: in a step
    rule: str = "hierarchical"  # as of `conclave.balance_experts`
    num_nodes: int = 1
    # Rows that each expert had [E], by which experts are placed at first: one for all layers, or by
    # the path of a block. By default experts lie in order, replicas behind them.
    initial_load: Any = None
    # `ExpertSlots` say where experts lie at first, in the place of initial_load.
    placement: ExpertSlots | Mapping[str, ExpertSlots] | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConclaveValueError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        if not 0 <= self.num_redundant_experts <= _MOST_REDUNDANT:
            raise ConclaveValueError(
                f"num_redundant_experts: expected 0 to {_MOST_REDUNDANT}, found "
                f"{self.num_redundant_experts}"
            )
        if self.rule not in balance_rules():
            raise ConclaveValueError(
                f"rule: expected one of {', '.join(balance_rules())}, found {self.rule!r}"
            )
        if self.placement is not None and self.initial_load is not None:
            raise ConclaveValueError("placement: expected None beside initial_load")


def options_of(given: EplbOptions | bool | None) -> EplbOptions | None:
    """What an argument says. Raises ConclaveTypeError for another type."""
    if given is None or isinstance(given, EplbOptions):
        return given
    if isinstance(given, bool):
        return EplbOptions() if given else None
    raise ConclaveTypeError(f"eplb: expected EplbOptions or a bool, found {type(given).__name__}")


class BlockPlacing:
    """Where one block's experts lie when they are packed: at first as the options say, later where
    they have moved to."""

    def __init__(self, options: EplbOptions, path: str) -> None:
        self._options, self._path = options, path
        self._moved: ExpertSlots | None = None

    @property
    def spare_experts(self) -> int:
        """Places of a rank through which experts move beside forwards."""
        return 1 if self._options.use_async else 0

    def keep(self, slots: ExpertSlots) -> None:
        """From now on they are packed where they are, unless some are on their way."""
        if len(slots.logical_of) == slots.num_experts + self._options.num_redundant_experts:
            self._moved = slots

    def parallel(self, num_experts: int, size: int, rank: int) -> dict[str, Any]:
        """A rank's part of the block."""
        slots = self._moved or self.first_slots(num_experts, size)
        return to_dict(slots.parallel(ep_size=size, ep_rank=rank))

    def first_slots(self, num_experts: int, size: int) -> ExpertSlots:
        """Where they lie at first. Raises ConclaveValueError naming what does not fit the block."""
        options = self._options
        if options.placement is not None:
            return self._checked(self._own(options.placement), num_experts, size)
        if options.initial_load is not None:
            load = self._own(options.initial_load)
            if len(load) != num_experts:
                raise ConclaveValueError(
                    f"initial_load: expected the rows of {num_experts} experts of {self._path}, "
                    f"found {len(load)}"
                )
            return balance_experts(
                load,
                num_ranks=size,
                num_redundant_experts=options.num_redundant_experts,
                rule=options.rule,
                num_nodes=options.num_nodes,
            )
        plain = ParallelSpec(ep_size=size, num_redundant_experts=options.num_redundant_experts)
        count, logical_of, first_of = _conclave.slots_of(num_experts, to_dict(plain))
        return ExpertSlots(count, tuple(logical_of), tuple(first_of))

    def _own(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if self._path not in given:
            raise ConclaveValueError(
                f"placement, initial_load: expected those of {self._path}, found {list(given)}"
            )
        return given[self._path]

    def _checked(self, slots: Any, num_experts: int, size: int) -> ExpertSlots:
        if not isinstance(slots, ExpertSlots):
            raise ConclaveTypeError(
                f"placement: expected ExpertSlots, found {type(slots).__name__}"
            )
        if (slots.num_experts, slots.num_ranks) != (num_experts, size):
            raise ConclaveValueError(
                f"placement: expected {num_experts} experts on {size} ranks for {self._path}, "
                f"found {slots.num_experts} on {slots.num_ranks}"
            )
        redundant = len(slots.logical_of) - num_experts
        if redundant != self._options.num_redundant_experts:
            raise ConclaveValueError(
                f"num_redundant_experts: expected {redundant}, as in the placement of "
                f"{self._path}, found {self._options.num_redundant_experts}"
            )
        missing = set(range(num_experts)) - set(slots.logical_of)
        if missing:
            raise ConclaveValueError(
                f"placement: expected a slot of each expert of {self._path}, found none of expert "
                f"{min(missing)}"
            )
        slots.parallel(ep_size=size)  # raises for what is none
        return slots


def require_fit(options: EplbOptions, candidates: Sequence[Candidate]) -> None:
    """Raises ConclaveValueError for what fits no block of a model, before any is replaced."""
    paths = [candidate.path for candidate in candidates]
    for name in ("placement", "initial_load"):
        given = getattr(options, name)
        for path in given if isinstance(given, Mapping) else ():
            if path not in paths:
                raise ConclaveValueError(
                    f"{name}: expected paths of blocks ({', '.join(paths[:3])}), found {path!r}"
                )
    for candidate in candidates:
        ranks, count = spread_of_experts(candidate)
        if ranks > 1:
            BlockPlacing(options, candidate.path).first_slots(count, ranks)
