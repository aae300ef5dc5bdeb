"""Experts that move between ranks while a layer's forwards go on."""

from __future__ import annotations

import dataclasses

from conclave import _conclave, _limits
from conclave.balance import ExpertSlots
from conclave.checkpoint import Checkpoint, Feed
from conclave.layer import Layer, copying, required_ranks, slots_of, source_of
from conclave.ranks import Communicator
from conclave.spec import ParallelSpec


@dataclasses.dataclass(frozen=True)
class MigrationStatus:
    """How far experts have come."""

    is_done: bool  # forwards use all of their new places
    has_failed: bool  # it will not go on; the layer stays as it is
    rounds: int  # placements from the first to the last
    rounds_done: int
    experts_moved: int  # to and from any rank


class Migration:
    """Experts on their way to other places, copied by a thread of its own beside forwards.

    Made on every rank of a layer with the same arguments. When all ranks have what a round brings,
    their next forward uses it; no forward waits. The layer needs `LayerOptions.spare_experts`. One
    at a time for a layer.

    Args:
        layer: whose experts move.
        slots: what each rank shall hold, or a split that says so.
        communicator: the same ranks as the layer's, in a group that serves nothing else meanwhile.
        source: a checkpoint or feed and the number of its layer, from which ranks read the experts
            that come, instead of having them sent.
        processor_share: the part of a core that copying may take; from 1 on it never rests.
        piece_bytes: of a message.

    Raises:
        ConclaveValueError, ConclaveUnsupportedError: where the layer cannot have the slots, or has
            no place for experts to move through.
    """

    def __init__(
        self,
        layer: Layer,
        slots: ExpertSlots | ParallelSpec,
        communicator: Communicator,
        *,
        source: tuple[Checkpoint | Feed, int] | None = None,
        processor_share: float = 0.05,
        piece_bytes: int = 256 << 10,
    ) -> None:
        self._core: _conclave.Migration | None = _conclave.Migration(
            _limits.instance("layer", layer, Layer, "a Layer")._core,
            *slots_of(layer, slots),
            required_ranks(communicator, "communicator"),
            *source_of(source),
            *copying(processor_share, piece_bytes),
        )
        self._last = MigrationStatus(False, False, 0, 0, 0)

    @property
    def status(self) -> MigrationStatus:
        """How far it has come; after `close` how far it had."""
        if self._core is not None:
            self._last = MigrationStatus(*self._core.status())
        return self._last

    def check(self) -> None:
        """Raises the error that ended it, if one did. Waits for nothing."""
        if self._core is not None:
            self._core.check()

    def finish(self) -> None:
        """Waits until it is done. On every rank at the same place between forwards.

        Raises:
            ConclaveCommError: where ranks disagree, one is lost or late, or a copy differs.
        """
        if self._core is not None:
            self._core.finish()

    def close(self) -> None:
        """Ends it where it is: before it is done, its communicator is of no use afterwards."""
        self._last = self.status
        self._core = None

    def __enter__(self) -> Migration:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
