"""Experts that move between ranks as their load changes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from conclave import _conclave, _limits
from conclave.errors import ConclaveValueError
from conclave.layer import Layer, copying, required_ranks
from conclave.ranks import Communicator

_MOST = 2**31 - 1
_MOST_STEPS = 2**63 - 1

_logger = logging.getLogger("conclave.balancer")


@dataclasses.dataclass(frozen=True)
class BalancerStatus:
    """What a balancer has done."""

    steps: int
    rebalances: int  # begun
    experts_moved: int  # in all layers, to and from any rank
    is_moving: bool  # a rebalance is under way
    balancedness: float  # mean over largest rows of ranks, of this rank's rows in the last step


class Balancer:
    """Counts rows in a window of steps, now and then adds up the counts of all ranks, and moves
    experts where `balance_experts` says, layer by layer.

    One on each rank, with the same arguments. A step is a forward of each layer; `step` follows.

    Args:
        layers: whose experts move, made with ``count=True``, the default on the CPU. With
            `use_async` each needs `LayerOptions.spare_experts`.
        communicator: the same ranks as the layers', in a group that serves nothing else.
        rule, num_nodes, least_gain: as of `balance_experts`.
        window_size: steps whose rows count, the last ones.
        step_interval: steps from one rebalance to the next; the first comes after a quarter.
        log_balancedness: to the logger "conclave.balancer", every `log_balancedness_interval`
            steps and whenever experts move.
        use_async: experts move beside forwards, which never wait. False: between two forwards, in
            the step that finds it is time.
        processor_share: the part of a core that copying may take, with `use_async`.
        piece_bytes: of a message.

    Raises:
        ConclaveValueError: naming the argument.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        communicator: Communicator,
        *,
        rule: str = "hierarchical",
        num_nodes: int = 1,
        least_gain: float = 0.01,
        window_size: int = 1000,
        step_interval: int = 3000,
        log_balancedness: bool = False,
        log_balancedness_interval: int = 1,
        use_async: bool = True,
        processor_share: float = 0.05,
        piece_bytes: int = 256 << 10,
    ) -> None:
        self._layers = [
            _limits.instance(f"layers[{i}]", layer, Layer, "a Layer")
            for i, layer in enumerate(_limits.listed("layers", layers))
        ]
        self._seen = [self._counted(layer) for layer in self._layers]
        self._core = _conclave.Balancer(
            [layer._core for layer in self._layers],
            required_ranks(communicator, "communicator"),
            _limits.text("rule", rule),
            _limits.integer("num_nodes", num_nodes, -_MOST, _MOST),
            _limits.real("least_gain", least_gain),
            _limits.integer("window_size", window_size, -_MOST_STEPS, _MOST_STEPS),
            _limits.integer("step_interval", step_interval, -_MOST_STEPS, _MOST_STEPS),
            _limits.flag("log_balancedness", log_balancedness),
            _limits.integer(
                "log_balancedness_interval", log_balancedness_interval, -_MOST_STEPS, _MOST_STEPS
            ),
            _limits.flag("use_async", use_async),
            *copying(processor_share, piece_bytes),
            _logger.info,
        )

    @staticmethod
    def _counted(layer: Layer) -> list[int]:
        load = layer.stats().expert_load
        if load is None:
            raise ConclaveValueError(
                "layers: expected layers that count rows, made with count=True"
            )
        return list(load)

    def step(self) -> None:
        """Ends a step: after the forwards of all layers, on every rank, from the same thread.

        Raises:
            ConclaveCommError: once, where ranks disagree, one is lost or late, or a copy differs;
                the layers go on where they are.
        """
        rows = []
        for index, layer in enumerate(self._layers):
            load = self._counted(layer)
            before = self._seen[index]
            # After Layer.reset_stats counts begin anew.
            is_reset = any(now < then for now, then in zip(load, before, strict=True))
            rows.append(
                load if is_reset else [now - then for now, then in zip(load, before, strict=True)]
            )
            self._seen[index] = load
        self._core.step(rows)

    def rebalance(self) -> None:
        """Begins a rebalance with the next step, unless one is under way."""
        self._core.rebalance()

    @property
    def status(self) -> BalancerStatus:
        """What it has done so far."""
        return BalancerStatus(*self._core.status())
