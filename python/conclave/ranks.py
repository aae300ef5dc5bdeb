"""Groups of ranks that a layer is split over: processes that a launcher started, or threads."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from conclave import _conclave, _limits, _meeting_places, _process_groups
from conclave._conclave import Communicator
from conclave._process_groups import from_process_group
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Transport:
    """A way in which ranks reach each other."""

    name: str
    usable: bool
    reason: str  # why it is not usable, or what its ranks are
    meets_by_exchange: bool = False  # of texts: whoever starts processes may start its ranks
    device_kind: str = ""  # whose memory it carries, one for each rank: "cuda"; "": the host's


def transports() -> list[Transport]:
    """The transports of this build, and whether groups of torch.distributed can be taken."""
    against = _process_groups.reason_against()
    of_torch = "processes of a group, over tcp, or nccl for GPUs (from_process_group)"
    rows = [Transport(*row) for row in _conclave.transports()]
    return [*rows, Transport(_process_groups.TRANSPORT, not against, against or of_torch)]


def connect(
    transport: str,
    *,
    rank: int = -1,
    size: int = 0,
    meeting_point: str = "",
    bootstrap: Any = None,
    device: str = "",
    group: int | None = None,
    timeout: float = 30.0,
) -> Communicator:
    """Joins this process to a group of ranks; all of them call it.

    Args:
        transport: a name of `transports`, such as "mpi" in a process that mpirun has started, or
            "torch.distributed" for its default group (`from_process_group`).
        rank, size: by default what the launcher says, or those of `bootstrap`.
        meeting_point: where ranks meet, in the transport's words; empty if its launcher knows.
        bootstrap: what the same ranks share already, over which they tell each other where they
            are; "tcp" and "nccl" need it. A Communicator of theirs; a group of torch.distributed
            or a store of it; "tcp://host:port", where rank 0 listens until all have come; the path
            of a directory that all of them see, which is removed afterwards if they had to make it;
            or a function that is given this rank's text and returns those of all ranks in rank
            order, each time it is called. With the last four, rank and size are to be given.
        device: whose memory it carries: "cpu", by default, or "cuda:0" for "nccl", whose default
            is the current device, and for "torch.distributed", as in `from_process_group`.
        group: splits the launcher's ranks: those that give the same number are a group of their
            own. All ranks call, also those of other groups.
        timeout: seconds, for meeting and for each wait. After it a wait raises.

    Raises:
        ConclaveCommError: naming the rank that did not come. ConclaveUnsupportedError: for a
        transport that this build or machine lacks, or that does not carry the device's memory,
        with the reason. Error: for an unknown transport, ranks that are none of the group, and
        what the bootstrap raises.
    """
    transport = _limits.text("transport", transport)
    rank = _limits.integer("rank", rank, -_MOST, _MOST)
    size = _limits.integer("size", size, -_MOST, _MOST)
    meeting_point = _limits.text("meeting_point", meeting_point)
    device = _limits.text("device", device)
    timeout = _limits.real("timeout", timeout)
    chosen = -1 if group is None else _limits.integer("group", group, -_MOST, _MOST)
    if group is not None and chosen < 0:
        raise ConclaveValueError(f"group: expected 0 or more, or None, found {group}")
    if transport == _process_groups.TRANSPORT:
        return _of_torch(rank, size, bootstrap, device, group, timeout)
    meeting = _meeting_of(bootstrap, rank, size, timeout)
    try:
        return _conclave.connect(
            transport,
            meeting.rank,
            meeting.size,
            meeting_point,
            chosen,
            timeout,
            device=device,
            bootstrap=meeting.bootstrap,
            exchange=meeting.exchange,
        )
    finally:
        meeting.clear()


@dataclasses.dataclass
class _Meeting:
    """How ranks that connect tell each other where they are."""

    rank: int
    size: int
    bootstrap: Communicator | None = None
    exchange: Callable[[str], list[str]] | None = None
    clear: Callable[[], None] = lambda: None  # takes back what was said


def _meeting_of(given: Any, rank: int, size: int, timeout: float) -> _Meeting:
    if given is None:
        return _Meeting(rank, size)
    if isinstance(given, Communicator):
        return _Meeting(*_own_rank(rank, size, given.rank, given.size), bootstrap=given)
    if _process_groups.is_group(given):
        of_group = _process_groups.group_exchange(given, timeout)
        own = _own_rank(rank, size, of_group.rank, of_group.size)
        return _Meeting(*own, exchange=of_group, clear=of_group.clear)
    is_path = isinstance(given, (str, os.PathLike))
    if not (is_path or callable(given) or _process_groups.is_store(given)):
        raise ConclaveTypeError(
            "bootstrap: expected a Communicator, a group or a store of torch.distributed, "
            f"tcp://host:port, a path or a function, found {type(given).__name__}"
        )
    if not 0 <= rank < size:
        raise ConclaveValueError(
            f"rank: expected one below size with this bootstrap, found {rank} of {size}"
        )
    place: Any
    if _process_groups.is_store(given):
        place = _process_groups.Exchange(given, rank, size, timeout)
    elif not is_path:
        return _Meeting(rank, size, exchange=_application_exchange(given, timeout))
    elif str(given).startswith("tcp://"):
        place = _meeting_places.Address(str(given), rank, size, timeout)
    else:
        place = _meeting_places.Files(given, rank, size, timeout)
    return _Meeting(rank, size, exchange=place, clear=place.clear)


def _own_rank(rank: int, size: int, own_rank: int, own_size: int) -> tuple[int, int]:
    if (rank, size) in ((-1, 0), (own_rank, own_size)):
        return own_rank, own_size
    raise ConclaveValueError(
        f"bootstrap: expected rank {rank} of {size}, found {own_rank} of {own_size}"
    )


def _application_exchange(
    given: Callable[[str], list[str]], timeout: float
) -> Callable[[str], list[str]]:
    until = time.monotonic() + timeout
    checked = _meeting_places.checked(given)
    return lambda mine: _process_groups.in_time(lambda: checked(mine), until, "bootstrap")


def _of_torch(
    rank: int, size: int, bootstrap: Any, device: str, group: int | None, timeout: float
) -> Communicator:
    if group is not None:
        raise ConclaveUnsupportedError(
            "group: torch.distributed splits its ranks by new_group; give that to "
            "from_process_group"
        )
    made = from_process_group(bootstrap, device=device or None, timeout=timeout)
    if (rank, size) not in ((-1, 0), (made.rank, made.size)):
        raise ConclaveValueError(
            f"rank: expected {made.rank} of {made.size}, as in the group, found {rank} of {size}"
        )
    return made


@dataclasses.dataclass(frozen=True)
class Survivors:
    """The ranks that are left after a failure."""

    communicator: Communicator
    old_ranks: tuple[int, ...]  # [size] which rank each was in the communicator that failed


def survivors(failed: Any, *, deadline: float | None = None) -> Survivors:
    """Goes on after a failure. Each rank that is left calls it once, where it has caught the
    `ConclaveCommError`; `failed` stays unusable.

    They agree on who is left as soon as every rank has come or is known to have ended, at the
    latest at the deadline: a rank that is late, stopped or dead then is left out. Called on a
    communicator that works it makes the operations of the others fail first.

    Args:
        failed: a Communicator, or the group of torch.distributed that layers were given.
        deadline: seconds to wait for the others; by default the communicator's timeout. Make it
            longer than ranks compute between two operations.

    Raises:
        ConclaveCommError: with the name kCommExcluded on a rank that came after the others had gone
        on without it. Error: where the transport cannot do this, with the reason.
    """
    if deadline is not None and not _limits.real("deadline", deadline) > 0:
        raise ConclaveValueError(f"deadline: expected seconds above 0, or None, found {deadline}")
    if not isinstance(failed, Communicator):
        failed = _process_groups.shared_communicator(failed)
    communicator, old_ranks = _conclave.survivors(failed, deadline or 0.0)
    return Survivors(communicator, tuple(old_ranks))


def local_group(num_ranks: int, *, timeout: float = 30.0) -> list[Communicator]:
    """The ranks of a group of threads of this process, 4096 at most. Each is used by one thread."""
    return _conclave.local_group(
        _limits.integer("num_ranks", num_ranks, -_MOST, _MOST), _limits.real("timeout", timeout)
    )


def launch_command(transport: str, ranks: int) -> list[str]:
    """The words of a command that starts `ranks` ranks on this machine, to go before those of the
    program that connects; none where ranks are threads."""
    return _conclave.launch_command(
        _limits.text("transport", transport), _limits.integer("ranks", ranks, 1, _MOST)
    )


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
