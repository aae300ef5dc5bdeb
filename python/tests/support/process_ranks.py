"""Ranks that are processes of torch.distributed, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import conclave

_PRELOADED = ["conclave", "torch", "torch.distributed", "support.process_ranks"]


class Failed:
    """What a rank raised, and how many seconds after its start signal."""

    def __init__(self, error: BaseException, seconds: float) -> None:
        self.type = type(error).__name__
        self.name = getattr(error, "name", "")
        self.text = str(error)
        self.seconds = seconds
        self.is_comm_error = isinstance(error, conclave.ConclaveCommError)
        self.trace = "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"<{self.type} {self.name}: {self.text} after {self.seconds:.2f} s>"


def run_ranks(
    work: Callable[..., Any],
    ranks: int,
    folder: pathlib.Path,
    *arguments: Any,
    backend: str = "cpu:gloo",
    port: int | None = None,
    timeout: float = 60.0,
) -> list[Any]:
    """What work(rank, folder, *arguments) returned in each process, a `Failed` for what it raised,
    None for a process that was killed. Stopped processes are killed when the others have ended.
    Ranks meet at the TCPStore of a port, by default over a file, so that any rank may be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    folder.mkdir(exist_ok=True)
    processes = [
        context.Process(target=_rank, args=(work, rank, ranks, folder, backend, port, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + timeout
    running = list(processes)
    while running and time.monotonic() < until:
        running = [p for p in running if p.is_alive() and not is_stopped(p.pid)]
        time.sleep(0.01)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert not running, f"{len(running)} of {ranks} ranks still ran after {timeout} s"
    bad = [p.exitcode for p in processes if p.exitcode not in (0, -signal.SIGKILL)]
    assert not bad, f"ranks ended with {bad}"
    files = [folder / f"result-{rank}" for rank in range(ranks)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def is_stopped(pid: int | None) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] == "T"


def wait_for(file: pathlib.Path, timeout: float = 30.0) -> None:
    """Until another process has made the file."""
    until = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not come"
        time.sleep(0.005)


def _rank(work, rank, ranks, folder, backend, port, arguments) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    conclave.set_num_threads(1)
    if port is None:
        store = dist.FileStore(str(folder / "store"), ranks)
    else:
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    started = time.monotonic()
    try:
        found = work(rank, folder, *arguments)
    except BaseException as error:
        found = Failed(error, time.monotonic() - started)
    part = folder / f"part-{rank}"
    part.write_bytes(pickle.dumps(found))
    part.rename(folder / f"result-{rank}")
    # Peers that gloo has lost may keep a destroyed group waiting.
    os._exit(0) if isinstance(found, Failed) else dist.destroy_process_group()
