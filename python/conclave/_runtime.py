"""Contexts of the process and its number of threads."""

from __future__ import annotations

import os
import threading

from conclave import _conclave, _frameworks, _limits
from conclave.errors import ConclaveValueError

_contexts: dict[tuple[str, str], _conclave.Context] = {}
_lock = threading.Lock()
_threads_chosen = False
_threads_seen = 0
_MOST_THREADS = 2**31 - 1


def _reset_lock_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_reset_lock_in_child)


def _threads_of_environment() -> int:
    """CONCLAVE_NUM_THREADS, else the first number of OMP_NUM_THREADS, else 0."""
    for variable in ("CONCLAVE_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(variable, "").partition(",")[0].strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise ConclaveValueError(f"{variable} is not a thread count: {text!r}")
        return int(text)
    return 0


def set_num_threads(num_threads: int | None) -> None:
    """Sets the CPU threads of all layers, from their next call on.

    More threads than CPUs that this process may use are cut to these. None follows
    ``torch.get_num_threads()`` where torch is loaded, else ``CONCLAVE_NUM_THREADS`` or
    ``OMP_NUM_THREADS``, else all CPUs: this is the setting at the start.
    """
    global _threads_chosen, _threads_seen
    if num_threads is None:
        _threads_chosen = False
        _threads_seen = 0
        follow_threads()
        return
    num_threads = _limits.integer("num_threads", num_threads, 1, _MOST_THREADS)
    _threads_chosen = True
    _conclave.set_num_threads(num_threads)


def get_num_threads() -> int:
    """The CPU threads that layers use."""
    follow_threads()
    return _conclave.num_threads()


def follow_threads() -> None:
    """Takes over torch's number of threads, if it has changed and nobody chose another."""
    global _threads_seen
    if _threads_chosen:
        return
    torch = _frameworks.torch()
    threads = torch.get_num_threads() if torch is not None else -1
    if threads == _threads_seen:
        return
    _threads_seen = threads
    if torch is not None:
        _conclave.use_openmp()  # torch's own threads: two pools on the same cores are slow
    else:
        threads = _threads_of_environment() or _conclave.max_threads()
    _conclave.set_num_threads(threads)


def device_name(device: str | None = None) -> str:
    """The device that a layer runs on, by default CONCLAVE_DEVICE, else "cpu"."""
    if device is not None:
        _limits.text("device", device)
    device = device or os.environ.get("CONCLAVE_DEVICE") or "cpu"
    return "cuda:0" if device == "cuda" else device


def context(
    device: str | None = None,
    isa: str | None = None,
    communicator: _conclave.Communicator | None = None,
    tensor_communicator: _conclave.Communicator | None = None,
) -> _conclave.Context:
    """The context of a device that all of the process' layers share; with communicators one of a
    single layer.

    Defaults are CONCLAVE_DEVICE, else "cpu", and CONCLAVE_ISA, else the best one.
    """
    device = device_name(device)
    if isa is not None:
        _limits.text("isa", isa)
    isa = isa or os.environ.get("CONCLAVE_ISA") or ""
    follow_threads()
    if communicator is not None or tensor_communicator is not None:
        return _conclave.Context(device, isa, communicator, tensor_communicator)
    with _lock:
        found = _contexts.get((device, isa))
        if found is None:
            found = _conclave.Context(device, isa)
            _contexts[(device, isa)] = found
        return found
