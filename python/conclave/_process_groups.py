"""Groups of torch.distributed: ranks that find each other by a group's store."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from conclave import _conclave, _limits
from conclave._devices import traits_of
from conclave._meeting_places import LOST, TIMEOUT, comm_error
from conclave.errors import (
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
    from_code,
)

TRANSPORT = "torch.distributed"
_FORKED = (115, "kForked")
_KEYS = "conclave"
_LONGEST_PAUSE = 0.02
_Result = TypeVar("_Result")

# By group and by device: one communicator for all layers, as they run one after another.
_shared: weakref.WeakKeyDictionary[Any, dict[str, _conclave.Communicator]] = (
    weakref.WeakKeyDictionary()
)
# The groups of a parent process: their connections to the store are the parent's.
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def _note_groups_in_child() -> None:
    dist = _module()
    if dist is not None:
        _inherited.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_note_groups_in_child)


def reason_against() -> str:
    """Why groups cannot be taken here; empty where they can."""
    if "torch" not in sys.modules:
        return "torch is not imported"
    return "" if _module() is not None else "this build of torch has no torch.distributed"


def _module() -> Any:
    """torch.distributed where torch is loaded and built with it; else None."""
    found = getattr(sys.modules.get("torch"), "distributed", None)
    return found if found is not None and found.is_available() else None


def is_group(given: Any) -> bool:
    """Whether this is a group of torch.distributed, or vLLM's holder of one."""
    dist = _module()
    if dist is None:
        return False
    return isinstance(getattr(given, "cpu_group", given), dist.ProcessGroup)


def _is_of_others(given: Any) -> bool:
    """Whether new_group has returned this to a process that is no rank of the group."""
    dist = _module()
    return (
        dist is not None and isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER
    )


def communicator_of(
    given: Any, argument: str, device: str = "cpu"
) -> _conclave.Communicator | None:
    """A communicator as it is, that of a group which all layers of a device share, None for None.
    For a device of CUDA it is one of NCCL."""
    if given is None or isinstance(given, _conclave.Communicator):
        return given
    if _is_of_others(given):
        raise ConclaveValueError(f"{argument}: this process is no rank of it")
    if not is_group(given):
        raise ConclaveTypeError(
            f"{argument}: expected a Communicator or a group of torch.distributed, found "
            f"{type(given).__name__}"
        )
    group = getattr(given, "cpu_group", given)
    found = _shared.get(group, {}).get(device)
    if found is None or not found.is_usable:
        found = from_process_group(group, device=device)
        _shared.setdefault(group, {})[device] = found
    return found


def shared_communicator(given: Any) -> _conclave.Communicator:
    """What layers that were given this group have in common, failed or not."""
    if not is_group(given):
        raise ConclaveTypeError(
            "failed: expected a Communicator or a group of torch.distributed, found "
            f"{type(given).__name__}"
        )
    found = list(_shared.get(getattr(given, "cpu_group", given), {}).values())
    if not found:
        raise ConclaveValueError("failed: no layer was given this group")
    failed = (communicator for communicator in found if not communicator.is_usable)
    return next(failed, found[0])


def from_process_group(
    group: Any = None, *, device: str | None = None, timeout: float = 30.0
) -> _conclave.Communicator:
    """A communicator of the ranks of a torch.distributed group, with connections of its own: over
    tcp for memory of the CPU, over NCCL for that of a GPU.

    All ranks of the group call it, as they would a collective of the group: in the same order, one
    at a time. The group's own collectives are never used or disturbed, and it may be destroyed
    afterwards. Each call makes another communicator; `Layer` makes one for each group.

    Args:
        group: a ProcessGroup, such as ``torch.distributed.new_group(...)``, ``group.WORLD`` or
            ``mesh.get_group("ep")``; vLLM's GroupCoordinator stands for its cpu_group. None is the
            default group.
        device: whose memory it carries: "cpu", for which the group has a backend, as "gloo" and
            "cpu:gloo,cuda:nccl" are; or "cuda:0", whatever the backends are, a GPU for each rank.
            By default "cpu" where that is possible, else torch's current GPU.
        timeout: seconds, for meeting and for each wait. After it a wait raises.

    Raises:
        ConclaveCommError: naming the rank that did not come, or that the group's store is lost.
        Error: ConclaveValueError where this process is no rank of the group, or there is none;
            ConclaveUnsupportedError where the group carries no memory of the CPU and is asked to,
            or where this build or machine has no NCCL, or no such GPU, with the reason.
    """
    timeout = _limits.real("timeout", timeout)
    dist = _module()
    if dist is None:
        raise ConclaveUnsupportedError(f"group: {reason_against()}")
    group = _checked(dist, getattr(group, "cpu_group", group))
    device = _device_for(dist, group, device)
    exchange = Exchange(_store_of(dist, group), group.rank(), group.size(), timeout)
    made = _conclave.connect(
        traits_of(device).transport,
        group.rank(),
        group.size(),
        "",
        -1,
        timeout,
        device=device,
        exchange=exchange if group.size() > 1 else None,
    )
    exchange.clear()
    return made


def _device_for(dist: Any, group: Any, device: str | None) -> str:
    """Whose memory a communicator of the group carries."""
    if device not in (None, "cpu"):
        return "cuda:0" if device == "cuda" else str(device)
    backends = str(dist.get_backend_config(group))
    devices = [part.partition(":") for part in backends.split(",")]
    if any(kind == "cpu" or not colon for kind, colon, _ in devices):
        return "cpu"
    if device is None:
        cuda = sys.modules["torch"].cuda
        return f"cuda:{cuda.current_device() if cuda.is_available() else 0}"
    raise ConclaveUnsupportedError(
        f"group: its backends ({backends}) carry no memory of the CPU, where layers on the CPU "
        'exchange their rows; expected one for it, as in "cpu:gloo,cuda:nccl", or layers with '
        'device="cuda:0"'
    )


def group_exchange(group: Any, timeout: float) -> Exchange:
    """What ranks of a group tell each other, over its store."""
    dist = _module()
    group = _checked(dist, getattr(group, "cpu_group", group))
    return Exchange(_store_of(dist, group), group.rank(), group.size(), timeout)


def is_store(given: Any) -> bool:
    """Whether this is a store of torch.distributed: TCPStore, FileStore and others."""
    dist = _module()
    return dist is not None and isinstance(given, dist.Store)


def _checked(dist: Any, group: Any) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise ConclaveValueError("group: torch.distributed has no default group; initialise it")
        group = dist.group.WORLD
    if _is_of_others(group):
        raise ConclaveValueError("group: this process is no rank of it")
    if not isinstance(group, dist.ProcessGroup):
        raise ConclaveTypeError(
            f"group: expected a group of torch.distributed, found {type(group).__name__}"
        )
    if group in _inherited:
        text = "a group is that of the parent process; initialise torch.distributed after the fork"
        raise from_code(*_FORKED, f"group: {text}", "", "group", "", "", "", "")
    try:
        dist.get_backend_config(group)
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConclaveValueError("group: it has been destroyed") from error
    return group


def _store_of(dist: Any, group: Any) -> Any:
    """The group's own part of the store, where ranks of other groups see nothing."""
    if hasattr(group, "get_group_store"):
        with contextlib.suppress(RuntimeError):
            return group.get_group_store()
    return dist.distributed_c10d._world.pg_map[group][1]


class Exchange:
    """What each rank says, to all ranks, over a store of keys.

    Rank 0 numbers the meetings of a group, so that ranks meet again after one that failed on some
    of them: the others follow it to the newest one.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._until = time.monotonic() + timeout
        self._meeting = 0
        self._round = -1

    def __call__(self, mine: str) -> list[str]:
        self._round += 1
        return in_time(lambda: self._run(mine), self._until + 1.0)

    def clear(self) -> None:
        """Takes back what this rank has said: by now every rank has read it."""
        with contextlib.suppress(Error):
            in_time(self._take_back, time.monotonic() + 1.0)

    def _take_back(self) -> None:
        for number in range(self._round + 1):
            self._store.delete_key(self._key(number, self.rank))

    def _run(self, mine: str) -> list[str]:
        pause = 0.0005
        if self._round == 1:
            self._leave_behind()
        if self._round > 0:
            self._say(mine)
        while True:
            if self._round == 0 and self._joins():
                self._say(mine)
            keys = [self._key(self._round, rank) for rank in range(self.size)]
            if self._meeting > 0 and self._store.check(keys):
                return [bytes(self._store.get(key)).decode() for key in keys]
            if time.monotonic() >= self._until:
                late = self._first_silent(keys)
                raise comm_error(*TIMEOUT, late, f"rank {late} did not connect in time")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _joins(self) -> bool:
        """Whether this rank has just joined a meeting."""
        if self.rank == 0:
            if self._meeting > 0:
                return False
            self._meeting = self._store.add(f"{_KEYS}/meeting", 1)
            return True
        newest = self._store.add(f"{_KEYS}/meeting", 0)
        if newest <= max(self._meeting, self._last_meeting()):
            return False
        self._meeting = newest
        return True

    def _last_meeting(self) -> int:
        """The last one in which this rank has said where it is: it cannot say that twice."""
        return int(self._store.add(f"{_KEYS}/seen/{self.rank}", 0))

    def _leave_behind(self) -> None:
        self._store.add(f"{_KEYS}/seen/{self.rank}", self._meeting - self._last_meeting())

    def _key(self, number: int, rank: int) -> str:
        return f"{_KEYS}/{self._meeting}/{number}/{rank}"

    def _say(self, mine: str) -> None:
        self._store.set(self._key(self._round, self.rank), mine)

    def _first_silent(self, keys: list[str]) -> int:
        if self._meeting == 0:
            return 0
        silent = (rank for rank, key in enumerate(keys) if not self._store.check([key]))
        return next(silent, 0)


def in_time(
    work: Callable[[], _Result], until: float, place: str = "the store of the group"
) -> _Result:
    """What work() returns. A call of a store whose process has stopped returns never, so that it
    has a thread of its own, which is left behind then."""
    results: list[_Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name="conclave-meeting").start()
    if not done.wait(max(0.0, until - time.monotonic())):
        raise comm_error(*TIMEOUT, -1, f"{place} does not answer")
    if not errors:
        return results[0]
    if isinstance(errors[0], Error):
        raise errors[0]
    raise comm_error(*LOST, -1, f"{place}: {errors[0]}") from errors[0]
