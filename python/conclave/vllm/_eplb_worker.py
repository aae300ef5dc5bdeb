"""A thread that receives a layer's experts beside forwards, over a communicator of its own.

It holds neither the balancer nor its layers for longer than a transfer, so that both can end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from conclave import _conclave
from conclave.errors import from_code
from conclave.vllm._expert_moves import Arrived, ExpertMover, Kept


class Transfer(NamedTuple):
    """One layer's move, which every rank begins alike."""

    old: list[int]
    new: list[int]
    rows: Sequence[torch.Tensor]  # as `get_expert_weights` has them
    kept: Kept

    def versions(self) -> list[int]:
        """They change where somebody writes to the rows."""
        return [0 if rows.is_inference() else rows._version for rows in self.rows]


class _Line:
    """What the thread and its owner tell each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.asked: Transfer | None = None
        self.found: tuple[Arrived, list[int]] | BaseException | None = None
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


def _run(line: _Line, mover: ExpertMover) -> None:
    while True:
        with line.changed:
            line.changed.wait_for(lambda: line.asked is not None or line.is_closed)
            if line.is_closed:
                return
            asked, line.asked = line.asked, None
        assert asked is not None
        found: tuple[Arrived, list[int]] | BaseException
        try:
            versions = asked.versions()  # before: what is written meanwhile is noticed
            found = mover.receive(asked.old, asked.new, asked.rows, asked.kept), versions
        except BaseException as error:
            found = error
        del asked
        with line.changed:
            line.found = found
            line.changed.notify_all()


class TransferWorker:
    """Receives one layer at a time.

    Args:
        communicator: of the ranks, for this worker alone; None: one rank has all slots.
    """

    def __init__(self, communicator: _conclave.Communicator | None) -> None:
        self._line = _Line()
        self._asked: Transfer | None = None
        mover = ExpertMover(communicator)
        self.thread = threading.Thread(
            target=_run, args=(self._line, mover), name="conclave-eplb", daemon=True
        )
        self._end = weakref.finalize(self, self._line.close)
        self.thread.start()

    def ask(self, transfer: Transfer) -> None:
        """Begins the next one; what arrived of the last is let go."""
        self._asked = transfer
        with self._line.changed:
            self._line.found, self._line.asked = None, transfer
            self._line.changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether what was asked for has arrived or failed."""
        return self._line.found is not None

    @property
    def error(self) -> BaseException | None:
        """What the transfer met."""
        found = self._line.found
        return found if isinstance(found, BaseException) else None

    @property
    def is_current(self) -> bool:
        """Whether nobody has written to the rows since they were read."""
        found = self._line.found
        assert isinstance(found, tuple) and self._asked is not None
        return found[1] == self._asked.versions()

    def take(self) -> Arrived:
        """What has arrived."""
        found = self._line.found
        assert isinstance(found, tuple)
        self._line.found = None
        self._asked = None
        return found[0]

    def close(self) -> None:
        """Ends the thread, once a transfer that is under way has ended."""
        self._end()


_PHASE = "eplb: agree on what has arrived"
_MISMATCH = (702, "kCommMismatch")
FAILED, WAITS, STALE, READY = range(4)


def agreed_on_arrival(worker: TransferWorker, communicator: _conclave.Communicator | None) -> int:
    """The least of what the ranks say. Raises on every rank where one has failed: there its own
    error, on the others ConclaveCommError naming it."""
    mine = WAITS
    error = worker.error  # one that comes after the ranks have spoken is the next step's
    if error is not None:
        mine = FAILED
    elif worker.has_ended:
        mine = READY if worker.is_current else STALE
    told = [mine]
    if communicator is not None:
        all_told = torch.empty(communicator.size, dtype=torch.int64)
        communicator.all_gather(torch.tensor([mine]), all_told, None, _PHASE)
        told = all_told.tolist()
    if error is not None:
        raise error
    if FAILED in told:
        rank = told.index(FAILED)
        text = f"rank {rank}, phase {_PHASE}: rank {rank} could not receive its experts"
        raise from_code(*_MISMATCH, text, "", "expert_weights", "", "", "", "")
    return min(told)
