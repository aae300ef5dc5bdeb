"""conclave.connect: what ranks meet over, and what it refuses."""

from __future__ import annotations

import pathlib
import socket
import threading
import time

import numpy
import pytest

import conclave
from conclave import _meeting_places
from conclave.errors import (
    ConclaveCommError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)


def on_threads(ranks, work):
    """What work(rank) returned or raised in a thread of each rank."""
    results = [None] * ranks

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def expect_sums(connect, ranks):
    """connect(rank) joins a group whose sums are right."""

    def work(rank):
        group = connect(rank)
        assert (group.rank, group.size, group.name) == (rank, ranks, "tcp")
        total = numpy.zeros(1, dtype="int64")
        group.all_reduce(numpy.array([rank + 1], dtype="int64"), total)
        return int(total[0])

    assert on_threads(ranks, work) == [ranks * (ranks + 1) // 2] * ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_ranks_meet_over_files(tmp_path):
    for _ in range(2):  # a path may be used again after a meeting
        expect_sums(
            lambda rank: conclave.connect("tcp", rank=rank, size=3, bootstrap=tmp_path / "meet"), 3
        )
    assert not (tmp_path / "meet").exists()


def test_a_directory_of_the_caller_stays_and_what_lies_in_it(tmp_path):
    (tmp_path / "mine").write_text("of the caller")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path, tmp_path / "empty", str(tmp_path / "empty")):

        def connect(rank, place=place):
            return conclave.connect("tcp", rank=rank, size=3, bootstrap=place)

        expect_sums(connect, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]
    assert not list((tmp_path / "empty").iterdir())
    assert (tmp_path / "mine").read_text() == "of the caller"


@pytest.mark.parametrize("there_before", [True, False])
def test_a_meeting_that_fails_leaves_what_was_there(tmp_path, there_before):
    place = tmp_path / "meet"
    if there_before:
        place.mkdir()

    def come(rank):
        return conclave.connect("tcp", rank=rank, size=3, bootstrap=place, timeout=0.3)

    for outcome in on_threads(2, come):
        assert isinstance(outcome, ConclaveCommError) and outcome.name == "kCommTimeout"
    assert place.exists() == there_before
    assert not there_before or not list(place.iterdir())


def test_what_others_put_into_a_meeting_stays(tmp_path):
    place = tmp_path / "meet"
    meeting = _meeting_places.Files(place, rank=0, size=1, timeout=20)
    assert meeting("here") == ["here"]
    (place / "notes").write_text("of somebody")
    meeting.clear()
    assert [path.name for path in place.iterdir()] == ["notes"]


def test_texts_of_a_meeting_that_failed_are_neither_taken_nor_removed(tmp_path):
    (tmp_path / "0.0").write_text("an old place")
    with pytest.raises(ConclaveValueError, match="path of its own"):
        conclave.connect("tcp", rank=0, size=2, bootstrap=tmp_path)
    assert (tmp_path / "0.0").read_text() == "an old place"


def test_ranks_meet_at_an_address():
    place = f"tcp://127.0.0.1:{free_port()}"
    expect_sums(lambda rank: conclave.connect("tcp", rank=rank, size=3, bootstrap=place), 3)


def test_strangers_at_the_address_change_nothing():
    port = free_port()

    def work(rank):
        if rank < 2:
            return conclave.connect(
                "tcp", rank=rank, size=2, bootstrap=f"tcp://127.0.0.1:{port}", timeout=20
            ).size
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[7, 2, 0, 1]\n", b"", b"null\n"):
            for _ in range(50):
                try:
                    guest = socket.create_connection(("127.0.0.1", port), 1)
                except OSError:
                    time.sleep(0.01)
                    continue
                guest.sendall(words)
                guest.close()
                break
        return 0

    assert on_threads(3, work)[:2] == [2, 2]


def test_ranks_meet_over_a_communicator_and_a_function():
    before = conclave.local_group(2)
    expect_sums(lambda rank: conclave.connect("tcp", bootstrap=before[rank]), 2)

    texts: dict[tuple[int, int], str] = {}
    rounds = [0, 0]

    def exchange_of(rank):
        def exchange(mine):
            number = rounds[rank]
            rounds[rank] += 1
            texts[number, rank] = mine
            while not all((number, other) in texts for other in range(2)):
                time.sleep(0.001)
            return [texts[number, other] for other in range(2)]

        return exchange

    expect_sums(
        lambda rank: conclave.connect("tcp", rank=rank, size=2, bootstrap=exchange_of(rank)), 2
    )


def test_ranks_meet_over_a_store_of_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    path = str(tmp_path / "store")

    def connect(rank):
        store = torch.distributed.FileStore(path, 2)
        return conclave.connect("tcp", rank=rank, size=2, bootstrap=store)

    expect_sums(connect, 2)


@pytest.mark.parametrize("place", ["files", "address", "function"])
def test_a_rank_that_does_not_come_is_a_timeout(tmp_path, place):
    over = {
        "files": tmp_path / "meet",
        "address": f"tcp://127.0.0.1:{free_port()}",
        "function": lambda mine: time.sleep(3),
    }[place]
    begin = time.monotonic()
    with pytest.raises(ConclaveCommError) as caught:
        conclave.connect("tcp", rank=0, size=2, bootstrap=over, timeout=0.3)
    assert caught.value.name == "kCommTimeout"
    assert (caught.value.peer, caught.value.phase) == (-1 if place == "function" else 1, "connect")
    assert time.monotonic() - begin < 3


def test_other_sizes_at_an_address_are_a_mismatch():
    place = f"tcp://127.0.0.1:{free_port()}"
    first, second = on_threads(
        2,
        lambda rank: conclave.connect("tcp", rank=rank, size=2 + rank, bootstrap=place, timeout=5),
    )
    assert isinstance(first, ConclaveCommError) and first.name == "kCommMismatch"
    assert first.peer == 1
    assert isinstance(second, ConclaveCommError)


def test_wrong_bootstraps_are_refused(tmp_path):
    with pytest.raises(ConclaveUnsupportedError, match="bootstrap"):
        conclave.connect("tcp", rank=0, size=2)
    with pytest.raises(ConclaveValueError, match="rank"):
        conclave.connect("tcp", bootstrap=tmp_path)
    with pytest.raises(ConclaveValueError, match="tcp://host:port"):
        conclave.connect("tcp", rank=0, size=2, bootstrap="tcp://nowhere")
    with pytest.raises(ConclaveTypeError, match="bootstrap"):
        conclave.connect("tcp", rank=0, size=2, bootstrap=7)
    with pytest.raises(ConclaveTypeError, match="texts of all ranks"):
        conclave.connect("tcp", rank=0, size=2, bootstrap=lambda mine: 3)
    with pytest.raises(ConclaveValueError, match="exchange"):
        conclave.connect("tcp", rank=0, size=3, bootstrap=lambda mine: [mine])
    with pytest.raises(ConclaveValueError, match="bootstrap"):
        conclave.connect("tcp", rank=1, size=3, bootstrap=conclave.connect("local"))
    with pytest.raises(ConclaveValueError, match="bootstrap"):
        blocked = pathlib.Path(tmp_path, "file")
        blocked.write_text("")
        conclave.connect("tcp", rank=0, size=2, bootstrap=blocked)


def test_devices_that_a_transport_does_not_carry_are_refused():
    for transport in ("local", "tcp"):
        with pytest.raises(ConclaveUnsupportedError, match="cuda:0"):
            conclave.connect(transport, device="cuda:0")
        assert conclave.connect(transport, device="cpu").size == 1


def test_nccl_says_what_it_lacks():
    row = next(row for row in conclave.transports() if row.name == "nccl")
    if row.usable:
        pytest.skip("this machine has GPUs and NCCL")
    before = conclave.local_group(2)
    for rank in range(2):
        with pytest.raises(ConclaveUnsupportedError) as caught:
            conclave.connect("nccl", bootstrap=before[rank], device="cuda:0")
        assert row.reason in str(caught.value)
    # The ranks that were to bring it up are as before.
    assert on_threads(2, lambda rank: before[rank].barrier()) == [None, None]
