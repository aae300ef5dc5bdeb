"""Groups of ranks that a layer is split over: processes that a launcher started, or threads."""

from __future__ import annotations

import dataclasses

from conclave import _conclave, _process_groups
from conclave._conclave import Communicator
from conclave._process_groups import from_process_group
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError


@dataclasses.dataclass(frozen=True)
class Transport:
    """A way in which ranks reach each other."""

    name: str
    usable: bool
    reason: str  # why it is not usable, or what its ranks are


def transports() -> list[Transport]:
    """The transports of this build, and whether groups of torch.distributed can be taken."""
    against = _process_groups.reason_against()
    of_torch = "processes of a group, over tcp (from_process_group)"
    rows = [Transport(*row) for row in _conclave.transports()]
    return [*rows, Transport(_process_groups.TRANSPORT, not against, against or of_torch)]


def connect(
    transport: str,
    *,
    rank: int = -1,
    size: int = 0,
    meeting_point: str = "",
    group: int | None = None,
    timeout: float = 30.0,
) -> Communicator:
    """Joins this process to a group of ranks; all of them call it.

    Args:
        transport: a name of `transports`, such as "mpi" in a process that mpirun has started, or
            "torch.distributed" for its default group (`from_process_group`).
        rank, size: by default what the launcher says.
        meeting_point: where ranks meet, in the transport's words; empty if its launcher knows.
        group: splits the launcher's ranks: those that give the same number are a group of their
            own. All ranks call, also those of other groups.
        timeout: seconds, for meeting and for each wait. After it a wait raises.

    Raises:
        ConclaveCommError: naming the rank that did not come. Error: for an unknown transport, and
        one that this build or machine lacks, with the reason.
    """
    chosen = -1 if group is None else group
    if group is not None and group < 0:
        raise ConclaveValueError(f"group: expected 0 or more, or None, found {group}")
    if transport == _process_groups.TRANSPORT:
        return _default_group(rank, size, group, timeout)
    return _conclave.connect(transport, rank, size, meeting_point, chosen, timeout)


def _default_group(rank: int, size: int, group: int | None, timeout: float) -> Communicator:
    if group is not None:
        raise ConclaveUnsupportedError(
            "group: torch.distributed splits its ranks by new_group; give that to "
            "from_process_group"
        )
    made = from_process_group(timeout=timeout)
    if (rank, size) not in ((-1, 0), (made.rank, made.size)):
        raise ConclaveValueError(
            f"rank: expected {made.rank} of {made.size}, as in the default group, found "
            f"{rank} of {size}"
        )
    return made


@dataclasses.dataclass(frozen=True)
class Survivors:
    """The ranks that are left after a failure."""

    communicator: Communicator
    old_ranks: tuple[int, ...]  # [size] which rank each was in the communicator that failed


def survivors(failed: Communicator, *, deadline: float | None = None) -> Survivors:
    """Goes on after a failure. Each rank that is left calls it once, where it has caught the
    `ConclaveCommError`; `failed` stays unusable.

    They agree on who is left as soon as every rank has come or is known to have ended, at the
    latest at the deadline: a rank that is late, stopped or dead then is left out. Called on a
    communicator that works it makes the operations of the others fail first.

    Args:
        deadline: seconds to wait for the others; by default the communicator's timeout. Make it
            longer than ranks compute between two operations.

    Raises:
        ConclaveCommError: with the name kCommExcluded on a rank that came after the others had gone
        on without it. Error: where the transport cannot do this, with the reason.
    """
    if deadline is not None and not deadline > 0:
        raise ConclaveValueError(f"deadline: expected seconds above 0, or None, found {deadline}")
    communicator, old_ranks = _conclave.survivors(failed, deadline or 0.0)
    return Survivors(communicator, tuple(old_ranks))


def local_group(num_ranks: int, *, timeout: float = 30.0) -> list[Communicator]:
    """The ranks of a group of threads of this process. Each is used by one thread."""
    return _conclave.local_group(num_ranks, timeout)


def launch_command(transport: str, ranks: int) -> list[str]:
    """The words of a command that starts `ranks` ranks on this machine, to go before those of the
    program that connects; none where ranks are threads."""
    return _conclave.launch_command(transport, ranks)


__all__ = [
    "Communicator",
    "Survivors",
    "Transport",
    "connect",
    "from_process_group",
    "launch_command",
    "local_group",
    "survivors",
    "transports",
]
