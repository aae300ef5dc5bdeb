"""Layers that are split over ranks: threads, and processes of MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest

import conclave
from conclave.errors import ConclaveCommError, ConclaveValueError, Error

SPEC = {"num_experts": 7, "top_k": 2}


def made_weights() -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(3)
    return {
        "gate_up": random.standard_normal((7, 48, 40), dtype="float32"),
        "down": random.standard_normal((7, 40, 24), dtype="float32"),
        "router": random.standard_normal((7, 40), dtype="float32"),
    }


def made_rows(tokens: int, seed: int = 4) -> numpy.ndarray:
    return numpy.random.default_rng(seed).standard_normal((tokens, 40), dtype="float32")


def on_ranks(groups, work):
    """What work(rank number, *communicators) returns in a thread of each rank."""
    results = [None] * len(groups)

    def run(rank):
        try:
            results[rank] = work(rank, *groups[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_experts_on_ranks_have_the_bits_of_one(ranks):
    weights = made_weights()
    whole = conclave.Layer.from_tensors(SPEC, **weights)

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)
        # Every rank has rows of its own, one of them none.
        return [layer(made_rows(5 * rank + extra, seed=rank)) for extra in (0, 3)]

    groups = [(rank,) for rank in conclave.local_group(ranks)]
    for rank, outputs in enumerate(on_ranks(groups, work)):
        for extra, output in zip((0, 3), outputs, strict=True):
            expected = whole(made_rows(5 * rank + extra, seed=rank))
            assert numpy.array_equal(output, expected)


def test_replicas_by_counted_loads_keep_the_bits():
    weights = made_weights()
    whole = conclave.Layer.from_tensors(SPEC, **weights)
    rows = made_rows(50)
    expected = whole(rows)
    slots = conclave.balance_experts(
        whole.stats().expert_load, rule="global", num_ranks=3, num_redundant_experts=4
    )

    def work(rank, experts):
        split = slots.parallel(ep_rank=rank)
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, parallel=split, **weights)
        return layer(rows)

    groups = [(rank,) for rank in conclave.local_group(3)]
    for output in on_ranks(groups, work):
        assert numpy.array_equal(output, expected)


def test_slices_and_both_add_up():
    weights = made_weights()
    rows = made_rows(9)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)

    def sliced(rank, slices):
        layer = conclave.Layer.from_tensors(SPEC, tensor_communicator=slices, **weights)
        return layer(rows)

    for output in on_ranks([(rank,) for rank in conclave.local_group(3)], sliced):
        numpy.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-4)

    # Ranks 0 and 2, 1 and 3 exchange rows; 0 and 1, 2 and 3 add up.
    experts = [conclave.local_group(2) for _ in range(2)]
    slices = [conclave.local_group(2) for _ in range(2)]

    def both(rank, of_experts, of_slices):
        layer = conclave.Layer.from_tensors(
            SPEC, communicator=of_experts, tensor_communicator=of_slices, **weights
        )
        return layer(rows)

    groups = [(experts[rank % 2][rank // 2], slices[rank // 2][rank % 2]) for rank in range(4)]
    for output in on_ranks(groups, both):
        numpy.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-4)


def test_a_rank_that_does_not_come_is_named_by_the_deadline():
    first, second = conclave.local_group(2, timeout=0.3)
    assert (first.rank, first.size, first.name) == (0, 2, "local")
    assert first.timeout == pytest.approx(0.3)
    begin = time.monotonic()
    with pytest.raises(ConclaveCommError, match="rank 1") as caught:
        first.barrier()
    assert caught.value.name == "kCommTimeout"
    assert time.monotonic() - begin < 5
    with pytest.raises(ConclaveCommError):
        second.barrier()


def test_abort_reaches_a_waiting_rank():
    first, second = conclave.local_group(2)
    timer = threading.Timer(0.2, second.abort, ["the operator said so"])
    timer.start()
    with pytest.raises(ConclaveCommError, match="the operator said so"):
        first.barrier()
    timer.join()


def going_on(rank, experts, victim, parallel, weights, rows, **source):
    """What the ranks compute that are left when one has gone; the victim, nothing."""
    layer = conclave.Layer.from_tensors(SPEC, communicator=experts, parallel=parallel, **weights)
    if rank == victim:
        experts.barrier()  # The others have their layers.
        experts.abort("the operator took it away")
        return None
    with pytest.raises(ConclaveCommError) as caught:
        while True:
            experts.barrier()
    assert caught.value.peer == victim
    left = conclave.survivors(experts, deadline=0.5)
    assert left.old_ranks == tuple(other for other in range(experts.size) if other != victim)
    fewer = layer.on_ranks(left.communicator, old_ranks=left.old_ranks, **source)
    assert fewer.parallel.ep_size == experts.size - 1
    return fewer(rows)


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on_with_replicas_and_without(victim):
    weights = made_weights()
    rows = made_rows(9)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)
    slots = conclave.balance_experts(
        [1.0] * 7, rule="surviving", num_ranks=3, num_redundant_experts=7
    )

    def with_replicas(rank, experts):
        split = slots.parallel(ep_rank=rank)
        return going_on(rank, experts, victim, split, weights, rows)

    def read_again(rank, experts):
        return going_on(rank, experts, victim, None, weights, rows, **weights)

    for work in (with_replicas, read_again):
        outputs = on_ranks([(rank,) for rank in conclave.local_group(3)], work)
        for rank, output in enumerate(outputs):
            assert (output is None) == (rank == victim)
            assert output is None or numpy.array_equal(output, expected)


def test_an_expert_that_nobody_holds_is_named():
    weights = made_weights()

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)
        if rank == 1:
            return
        # The deadline of the group would be half a minute, and rank 1 never calls.
        left = conclave.survivors(experts, deadline=3.0)
        with pytest.raises(Error, match=r"expert \d+") as caught:
            layer.on_ranks(left.communicator, old_ranks=left.old_ranks)
        assert caught.value.name == "kTensorMissing"

    on_ranks([(rank,) for rank in conclave.local_group(3)], work)


def test_a_rank_that_comes_too_late_is_told():
    on_time, late = conclave.local_group(2, timeout=0.2)
    alone = conclave.survivors(on_time)
    assert (alone.communicator.size, alone.old_ranks) == (1, (0,))
    with pytest.raises(ConclaveCommError, match="rank 1") as caught:
        conclave.survivors(late)
    assert caught.value.name == "kCommExcluded"
    with pytest.raises(Error):
        conclave.survivors(on_time)
    with pytest.raises(ConclaveValueError):
        conclave.survivors(alone.communicator, deadline=-1)


def test_ranks_that_join_serve_with_the_others():
    weights = made_weights()
    rows = made_rows(9)
    before = conclave.Layer.from_tensors(SPEC, **weights)
    expected = before(rows)

    def work(rank, experts):
        if rank == 0:
            return before.on_ranks(experts, **weights)(rows)
        return conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)(rows)

    for output in on_ranks([(rank,) for rank in conclave.local_group(3)], work):
        assert numpy.array_equal(output, expected)


def test_ranks_that_disagree_are_told():
    weights = made_weights()

    def work(rank, experts):
        spec = {**SPEC, "top_k": 1 + rank}
        with pytest.raises(ConclaveCommError):
            conclave.Layer.from_tensors(spec, communicator=experts, **weights)

    on_ranks([(rank,) for rank in conclave.local_group(2, timeout=5)], work)


def test_wrong_arguments_are_named():
    with pytest.raises(Error, match="pigeon"):
        conclave.connect("pigeon")
    with pytest.raises(ConclaveValueError, match="timeout"):
        conclave.connect("local", timeout=0)
    with pytest.raises(ConclaveValueError, match="timeout"):
        conclave.local_group(2, timeout=float("nan"))
    with pytest.raises(ConclaveValueError, match="num_ranks"):
        conclave.local_group(0)
    with pytest.raises(ConclaveValueError, match="group"):
        conclave.connect("local", group=-2)
    names = {transport.name: transport for transport in conclave.transports()}
    assert names["local"].usable and "mpi" in names
    assert conclave.connect("local").size == 1
    assert conclave.launch_command("local", 2) == []


MPI_PROGRAM = textwrap.dedent(
    """
    import numpy, conclave, pathlib, sys
    sys.path.insert(0, sys.argv[1])
    from test_ranks import SPEC, made_rows, made_weights
    experts = conclave.connect("mpi", timeout=20)
    conclave.set_num_threads(1)
    weights = made_weights()
    rows = made_rows(6 + experts.rank, seed=experts.rank)
    layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)
    whole = conclave.Layer.from_tensors(SPEC, **weights)
    same = numpy.array_equal(layer(rows), whole(rows))
    experts.barrier()
    # Lines of several ranks may run together on the way through the launcher.
    found = f"rank {experts.rank} of {experts.size}: {'equal' if same else 'different'}"
    pathlib.Path(sys.argv[2], str(experts.rank)).write_text(found)
    """
)


@pytest.mark.skipif(
    not any(row.name == "mpi" and row.usable for row in conclave.transports()),
    reason="this build has no MPI",
)
def test_processes_of_mpi_have_the_bits_of_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MPI_PROGRAM)
    tests = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(os.path.dirname(conclave.__file__)), tests])
    done = subprocess.run(
        [*conclave.launch_command("mpi", 3), sys.executable, program, tests, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    found = [tmp_path / str(rank) for rank in range(3)]
    assert all(file.exists() for file in found), done.stderr
    assert [file.read_text() for file in found] == [f"rank {rank} of 3: equal" for rank in range(3)]
