"""Layers over groups of torch.distributed: processes, their results and their faults."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest

import conclave
from conclave import _process_groups

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from support import group_work as work  # noqa: E402
from support.process_ranks import Failed, run_ranks  # noqa: E402

TOKENS = work.TOKENS


@pytest.fixture(scope="module")
def whole():
    """One rank's results for each rank's rows."""
    layer = work.layer_over()
    return [layer(work.made_rows(TOKENS[rank], seed=rank)).numpy() for rank in range(4)]


def equal(found, wanted) -> bool:
    return found.shape == wanted.shape and numpy.array_equal(found, wanted)


def on_threads(groups, run):
    """What run(rank, *communicators) returns in a thread for each rank."""
    results = [None] * len(groups)

    def body(rank):
        results[rank] = run(rank, *groups[rank])

    workers = [threading.Thread(target=body, args=(rank,)) for rank in range(len(groups))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return results


# Results.


def test_experts_have_the_bits_of_one_rank(tmp_path, whole):
    for rank, outputs in enumerate(run_ranks(work.experts, 4, tmp_path / "4")):
        assert len(outputs) == 6 and all(equal(found, whole[rank]) for found in outputs)
    for rank, outputs in enumerate(run_ranks(work.experts, 3, tmp_path / "3")):
        assert all(equal(found, whole[rank]) for found in outputs)


def test_ranks_meet_at_a_store_with_a_server(tmp_path, whole):
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found = run_ranks(work.experts, 2, tmp_path, port=server.port)
    for rank, outputs in enumerate(found):
        assert all(equal(output, whole[rank]) for output in outputs)


def test_slices_have_the_bits_of_threads(tmp_path):
    def sliced(rank, slices):
        return work.layer_over(None, slices)(work.made_rows(9)).numpy()

    def both(rank, experts, slices):
        return work.layer_over(experts, slices)(work.made_rows(9)).numpy()

    wanted = on_threads([(rank,) for rank in conclave.local_group(4)], sliced)
    experts = [conclave.local_group(2) for _ in range(2)]
    slices = [conclave.local_group(2) for _ in range(2)]
    pairs = [(experts[rank % 2][rank // 2], slices[rank // 2][rank % 2]) for rank in range(4)]
    wanted_of_both = on_threads(pairs, both)
    for rank, (of_all, of_both) in enumerate(run_ranks(work.slices, 4, tmp_path)):
        assert equal(of_all, wanted[rank]) and equal(of_both, wanted_of_both[rank])


def test_ranks_give_each_other_the_layer(tmp_path, whole):
    for rank, outputs in enumerate(run_ranks(work.regrouped, 3, tmp_path)):
        assert len(outputs) == (2 if rank == 0 else 3)
        assert all(equal(found, whole[rank]) for found in outputs)


def test_groups_of_some_ranks(tmp_path, whole):
    for rank, (found, refusal) in enumerate(run_ranks(work.subgroups, 4, tmp_path)):
        assert equal(found, whole[rank])
        assert refusal.startswith("ConclaveValueError") and "no rank of it" in refusal


def test_collectives_of_the_application_go_on(tmp_path, whole):
    for rank, (outputs, sums) in enumerate(run_ranks(work.beside_collectives, 4, tmp_path)):
        assert all(equal(found, whole[rank]) for found in outputs)
        assert sums == [6.0 + 4 * step for step in range(10)]


def test_a_group_of_one(tmp_path):
    ((found, place),) = run_ranks(work.alone, 1, tmp_path)
    assert equal(found, work.layer_over()(work.made_rows(6)).numpy()) and place == (0, 1)


def test_sums_are_in_rank_order(tmp_path):
    total = float(((torch.tensor(1e8) + 1.0) - 1e8) + 1.0)
    for rank, (sums, gathered, blocks) in enumerate(run_ranks(work.sums, 4, tmp_path)):
        assert sums == [(total, total)] * 3
        assert gathered == [0, 1, 2, 3]
        assert blocks == [frm for frm in range(4) for _ in range(frm + rank)]


def test_backends(tmp_path, whole):
    for rank, found in enumerate(run_ranks(work.several_backends, 2, tmp_path / "both")):
        assert equal(found, whole[rank])
    for found in run_ranks(work.without_cpu, 2, tmp_path / "none"):
        assert found.type == "ConclaveUnsupportedError"
        assert "cuda:gloo" in found.text and "CPU" in found.text


def test_groups_of_gpus_meet_over_their_store(tmp_path):
    for rank, (asked, gathered) in enumerate(run_ranks(work.groups_of_gpus, 3, tmp_path)):
        devices = ["cuda:0", f"cuda:{rank}", "cuda:5"]
        assert asked[:3] == [("nccl", rank, 3, device) for device in devices]
        assert asked[3:] == [("tcp", rank, 3, "cpu"), ("nccl", rank, 3, "cuda:0")]
        assert gathered == [[10, 11, 12]] * 3


def test_without_nccl_gpus_are_refused_with_the_reason(tmp_path, whole):
    row = next(row for row in conclave.transports() if row.name == "nccl")
    if row.usable:
        pytest.skip("this machine has GPUs and NCCL")
    for rank, (found, rows) in enumerate(run_ranks(work.without_nccl, 2, tmp_path)):
        for name, text in found.items():
            assert text.startswith("ConclaveUnsupportedError"), (name, text)
            assert "nccl" in text and row.reason in text, (name, text)
        assert equal(rows, whole[rank])


@pytest.mark.cuda
def test_layers_on_gpus_over_groups(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    backend = "cpu:gloo,cuda:nccl"
    for found in run_ranks(work.layers_on_gpus, 2, tmp_path, backend=backend):
        assert isinstance(found, list) and len(found) == 5 and all(found), found


@pytest.mark.cuda
def test_experts_move_between_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for found in run_ranks(work.experts_on_gpus_move, 2, tmp_path, backend="cpu:gloo,cuda:nccl"):
        assert isinstance(found, list) and all(found), found


def test_wrong_arguments_are_named(tmp_path):
    wanted = {
        "number": ("ConclaveTypeError", "group"),
        "not a member": ("ConclaveValueError", "no rank of it"),
        "timeout": ("ConclaveValueError", "timeout"),
        "name": ("ConclaveTypeError", "communicator"),
        "twice": ("ConclaveValueError", "tensor_communicator"),
        "split": ("ConclaveUnsupportedError", "new_group"),
        "rank": ("ConclaveValueError", "rank"),
        "destroyed": ("ConclaveValueError", "destroyed"),
    }
    for found in run_ranks(work.wrong_arguments, 2, tmp_path):
        assert isinstance(found, dict), found.trace
        assert len(found) >= len(wanted) - 1
        for name, text in found.items():
            kind, part = wanted[name]
            assert text.startswith(kind) and part in text, (name, text)


def test_without_a_default_group():
    with pytest.raises(conclave.ConclaveValueError, match="default group"):
        conclave.from_process_group()
    rows = {row.name: row for row in conclave.transports()}
    assert rows["torch.distributed"].usable and rows["tcp"].usable


# Threads and forks.


def test_threads_with_groups_of_their_own(tmp_path, whole):
    for rank, outputs in enumerate(run_ranks(work.threads, 3, tmp_path)):
        for of_thread in outputs:
            assert len(of_thread) == 20
            assert all(equal(found, whole[rank]) for found in of_thread)


def test_a_forked_child_does_not_harm_its_parent(tmp_path, whole):
    for rank, (before, after, child) in enumerate(run_ranks(work.forks, 3, tmp_path)):
        assert equal(before, whole[rank]) and equal(after, whole[rank])
        assert child == "kForked kForked"


# Faults.

FAULTS = {
    "killed": "kCommPeerLost",
    "killed before": "kCommPeerLost",
    "exits": "kCommPeerLost",
    "stopped": "kCommTimeout",
    "late": "kCommTimeout",
    "throws": "kCommPeerLost",
    "aborts": "kCommAborted",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_rank_that_fails_is_named_in_time(tmp_path, kind):
    found = run_ranks(work.fault, 3, tmp_path, kind)
    for rank in (0, 2):
        assert isinstance(found[rank], tuple), found[rank].trace
        error, name, text, seconds, again, usable = found[rank]
        assert error == "ConclaveCommError" and again == "ConclaveCommError" and not usable
        assert name == FAULTS[kind], text
        assert "rank 1" in text and "phase" in text
        assert seconds < (work.DEADLINE + 3 if name == "kCommTimeout" else 3)
        if kind == "aborts":
            assert "the operator said so" in text
    if kind in ("late", "aborts"):
        assert found[1][0] == "ConclaveCommError"
    elif kind == "throws":
        assert found[1].text == "this rank has another problem"
    else:
        assert found[1] is None


PROGRAM = """
import os, sys, torch.distributed as dist, conclave
from support import group_work as work
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = conclave.from_process_group(timeout=1.5)
layer, other = work.layer_over(group), work.layer_over(dist.group.WORLD)
layer(work.made_rows(5))
group.barrier()
if rank == 1:
    os.kill(os.getpid(), int(sys.argv[3]))
try:
    while True:
        layer(work.made_rows(5))
        group.barrier()
except conclave.ConclaveCommError as error:
    print(error.name, flush=True)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_program_ends_by_itself_after_a_failure(tmp_path, ending):
    """With its group, layers and communicators as they are when the interpreter is taken down."""
    folders = [pathlib.Path(conclave.__file__).parents[1], pathlib.Path(__file__).parent]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), str(int(ending))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        )
        for rank in range(2)
    ]
    try:
        output, errors = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    names = {signal.SIGKILL: "kCommPeerLost", signal.SIGSTOP: "kCommTimeout"}
    assert output.split() == [names[ending]], errors
    assert ranks[0].returncode == 0, errors
    assert ranks[1].returncode == -signal.SIGKILL


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_are_left_go_on(tmp_path, whole, ending):
    first, _, last = run_ranks(work.goes_on, 3, tmp_path, int(ending))
    assert equal(first, whole[0]) and equal(last, whole[2])


@pytest.mark.parametrize("call", ["disagreeing_layers", "disagreeing_calls", "disagreeing_sizes"])
def test_ranks_that_disagree_are_told(tmp_path, call):
    for found in run_ranks(getattr(work, call), 2, tmp_path):
        assert isinstance(found, Failed) and found.name == "kCommMismatch", found
        assert found.seconds < 10


def test_a_rank_that_does_not_connect_is_named(tmp_path):
    first, second = run_ranks(work.never_connects, 2, tmp_path)
    assert first.name == "kCommTimeout" and "rank 1" in first.text
    assert 0.4 < first.seconds < 5 and second is None


SERVER = """
import time, torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(server.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_lost_is_told_in_time(end):
    """Nobody waits for its process beyond the deadline, whatever torch's calls do."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline())
        store = torch.distributed.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        server.send_signal(end)
        if end == signal.SIGKILL:
            server.wait()
        exchange = _process_groups.Exchange(store, 0, 2, 0.5)
        start = time.monotonic()
        with pytest.raises(conclave.ConclaveCommError, match="store of the group") as caught:
            exchange("a place")
        assert time.monotonic() - start < 5
        wanted = {signal.SIGSTOP: "kCommTimeout", signal.SIGKILL: "kCommPeerLost"}
        assert caught.value.name == wanted[end]
    finally:
        server.kill()
        server.wait()


def test_ranks_meet_after_a_meeting_that_failed(tmp_path, whole):
    for rank, found in enumerate(run_ranks(work.comes_at_last, 3, tmp_path)):
        assert equal(found, whole[rank])


def test_layers_of_a_group_go_on_after_a_failure(tmp_path, whole):
    for rank, found in enumerate(run_ranks(work.group_after_failure, 3, tmp_path)):
        assert equal(found, whole[rank])
