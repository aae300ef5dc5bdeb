"""Layers that get new weights while they serve: from arrays, checkpoints and other processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from test_ranks import on_ranks

import conclave

EXPERTS, HIDDEN, INNER = 6, 64, 32
SPEC = conclave.MoeSpec(
    num_experts=EXPERTS,
    top_k=2,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    weight_dtype="float32",
)
MODES = ("staged", "staged_copy", "in_place")


def weights_of(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "gate_up": random.standard_normal((EXPERTS, 2 * INNER, HIDDEN), np.float32) / 8,
        "down": random.standard_normal((EXPERTS, HIDDEN, INNER), np.float32) / 8,
        "router": random.standard_normal((EXPERTS, HIDDEN), np.float32),
    }


HIDDEN_ROWS = np.random.default_rng(9).standard_normal((5, HIDDEN), np.float32)


def layer_of(weights: dict[str, np.ndarray]) -> conclave.Layer:
    return conclave.Layer.from_tensors(SPEC, **weights)


def run(layer: conclave.Layer) -> np.ndarray:
    return layer.forward(HIDDEN_ROWS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


@pytest.mark.parametrize("mode", MODES)
def test_all_weights_become_those_of_a_fresh_layer(mode):
    layer = layer_of(weights_of(1))
    fresh = layer_of(weights_of(2))
    with layer.refit(mode=mode, epoch=17, threads=2, keeps_memory=True) as refit:
        refit.stage(**weights_of(2))
        assert refit.is_staged
    np.testing.assert_array_equal(run(layer), run(fresh))
    assert layer.content_hash() == fresh.content_hash()
    assert layer.stats().refit_epoch == 17


@pytest.mark.parametrize("mode", MODES)
def test_parts_change_alone(mode):
    old, new = weights_of(1), weights_of(2)
    layer = layer_of(old)
    named = [4, 1]
    with layer.refit(mode=mode, experts=named) as refit:
        refit.stage(gate_up=new["gate_up"][named], down=new["down"][named])
    with layer.refit(mode=mode, tensors=["router"]) as refit:
        refit.stage(router=new["router"])
    merged = {name: array.copy() for name, array in old.items()}
    for name in ("gate_up", "down"):
        merged[name][named] = new[name][named]
    merged["router"] = new["router"]
    np.testing.assert_array_equal(run(layer), run(layer_of(merged)))
    with layer.refit(mode=mode, tensors=["gate_up", "down"]) as refit:
        for expert in range(EXPERTS):
            assert not refit.is_staged
            part = {name: old[name][[expert]] for name in ("gate_up", "down")}
            refit.stage(experts=[expert], tensors=["gate_up", "down"], **part)
    back = {**old, "router": new["router"]}
    np.testing.assert_array_equal(run(layer), run(layer_of(back)))
    assert layer.stats().refit_epoch == 3


def test_an_exception_keeps_the_old_weights():
    layer = layer_of(weights_of(1))
    before = run(layer)
    with pytest.raises(ZeroDivisionError), layer.refit() as refit:
        refit.stage(**weights_of(2))
        raise ZeroDivisionError
    with pytest.raises(conclave.ConclaveRuntimeError, match="not staged"), layer.refit(experts=[1]):
        pass
    with pytest.raises(conclave.Error, match="down"), layer.refit() as refit:
        wrong = weights_of(2)
        wrong["down"] = wrong["down"][:, :, :-1]
        refit.stage(**wrong)
    with pytest.raises(conclave.ConclaveValueError, match="experts"):
        layer.refit(experts=[EXPERTS])
    with pytest.raises(conclave.ConclaveValueError, match="expected 1"), layer.refit() as refit:
        refit.stage(experts=[1], **weights_of(2))
    with pytest.raises(conclave.ConclaveValueError, match="no weights of this name"):
        layer.refit(tensors=["gait"])
    with pytest.raises(conclave.ConclaveValueError, match="mode"):
        layer.refit(mode="hot")
    first = layer.refit()
    with pytest.raises(conclave.ConclaveRuntimeError, match="under way"):
        layer.refit()
    first.rollback()
    np.testing.assert_array_equal(run(layer), before)
    assert layer.stats().refit_epoch == 0


def test_an_exception_on_one_rank_is_told_to_the_others_at_once():
    old, new = weights_of(1), weights_of(2)

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **old)
        before = run(layer)
        began = time.monotonic()
        raised = None
        try:
            with layer.refit() as refit:
                refit.stage(**new)
                if rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, conclave.ConclaveCommError) as error:
            raised = error
        np.testing.assert_array_equal(run(layer), before)
        # A commit that failed has told them; leaving the block afterwards waits for nobody.
        with contextlib.suppress(conclave.Error), layer.refit() as refit:
            if rank != 1:
                refit.stage(**new)
            if rank == 1:
                refit.commit()
        np.testing.assert_array_equal(run(layer), before)
        # Unless more was staged since: the others wait for another commit.
        with contextlib.suppress(conclave.Error, ZeroDivisionError), layer.refit() as refit:
            if rank != 1:
                refit.stage(**new)
            with pytest.raises(conclave.Error):
                refit.commit()
            refit.stage(**new)
            if rank == 1:
                raise ZeroDivisionError
        np.testing.assert_array_equal(run(layer), before)
        with layer.refit() as refit:
            refit.stage(**new)
        assert layer.stats().refit_epoch == 1
        return raised, time.monotonic() - began

    groups = [(rank,) for rank in conclave.local_group(3, timeout=50)]
    results = on_ranks(groups, work)
    assert isinstance(results[1][0], ZeroDivisionError)
    for rank in (0, 2):
        error, took = results[rank]
        assert isinstance(error, conclave.ConclaveCommError) and error.peer == 1
        assert took < 20


class _Unreadable:
    def __iter__(self):
        raise ZeroDivisionError


REFUSED = [
    {"experts": [EXPERTS]},
    {"experts": ["one"]},
    {"experts": _Unreadable()},
    {"tensors": ["gait"]},
    {"mode": "hot"},
    {"epoch": -1},
    {"refusal": "loud"},
    {"experts": [EXPERTS], "refusal": "silent"},
]


def test_a_refit_that_one_rank_refuses_is_told_to_the_others_at_once():
    old, new = weights_of(1), weights_of(2)

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **old)
        before = run(layer)
        raised = []
        for wrong in REFUSED:
            try:
                with layer.refit(**(wrong if rank == 1 else {})) as refit:
                    refit.stage(**new)
            except (conclave.Error, TypeError, ZeroDivisionError) as error:
                raised.append(error)
                if rank == 1 and wrong.get("refusal") == "silent":
                    layer.withdraw_refit()
        np.testing.assert_array_equal(run(layer), before)
        with layer.refit() as refit:
            refit.stage(**new)
        assert layer.stats().refit_epoch == 1
        return raised

    groups = [(rank,) for rank in conclave.local_group(3, timeout=50)]
    for rank, raised in enumerate(on_ranks(groups, work)):
        assert len(raised) == len(REFUSED)
        for error in raised:
            if rank == 1:
                assert not isinstance(error, conclave.ConclaveCommError)
            else:
                assert isinstance(error, conclave.ConclaveCommError) and error.peer == 1
                assert "has withdrawn" in str(error)  # not a deadline


def test_forwards_beside_refits_see_one_of_both():
    pair = (weights_of(1), weights_of(2))
    layer = layer_of(pair[0])
    expected = [run(layer_of(weights)).tobytes() for weights in pair]
    seen: set[bytes] = set()
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            seen.add(run(layer).tobytes())

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 21):
        with layer.refit(mode=MODES[step % 2]) as refit:
            refit.stage(**pair[step % 2])
    stopped.set()
    for thread in threads:
        thread.join()
    assert seen <= set(expected)


def train(path, steps, done) -> None:
    """Another process: a version for each step, then the end in the middle of one."""
    writer = conclave.SharedWeightsWriter(path, SPEC, layer=3, **weights_of(1))
    for step in steps:
        writer.publish(version=step, **weights_of(step))
        done.put(step)
    done.put("end")


def write_and_die(path) -> None:
    big = conclave.MoeSpec(**{**SPEC.__dict__, "num_experts": 2048})
    weights = {
        "gate_up": np.ones((2048, 2 * INNER, HIDDEN), np.float32),
        "down": np.ones((2048, HIDDEN, INNER), np.float32),
    }
    writer = conclave.SharedWeightsWriter(path, big, **weights)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.start()
    while True:
        writer.publish(**weights)


def test_a_trainer_in_another_process_serves_a_layer(path):
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    trainer = context.Process(target=train, args=(path, [5, 8], done))
    trainer.start()
    while done.get(timeout=60) != "end":
        pass
    trainer.join(60)
    shared = conclave.SharedWeights(path)
    assert (shared.version, shared.layer) == (8, 3)
    assert set(shared.tensors) == {"gate", "up", "down", "router"}
    layer = layer_of(weights_of(1))
    with layer.refit(epoch=shared.version) as refit:
        refit.stage(shared)
    np.testing.assert_array_equal(run(layer), run(layer_of(weights_of(8))))


def test_a_writer_that_dies_or_goes_on_is_noticed(path):
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=write_and_die, args=(path,))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    # It dies between two versions or, most times, in one: a reader gets all of it or an error.
    try:
        assert conclave.SharedWeights(path).version > 0
    except conclave.ConclaveFileError as error:
        assert "being written" in str(error) or "published" in str(error)

    own = conclave.SharedWeightsWriter(path, SPEC, **weights_of(1))
    with pytest.raises(conclave.ConclaveFileError, match="never published"):
        conclave.SharedWeights(path)
    assert own.publish(**weights_of(2)) == 1
    shared = conclave.SharedWeights(path, verify=False)
    layer = layer_of(weights_of(1))
    before = run(layer)
    own.publish(**weights_of(3))
    with pytest.raises(conclave.ConclaveFileError, match="while they were read"):
        shared.check_unchanged()
    with pytest.raises(conclave.ConclaveFileError), layer.refit() as refit:
        refit.stage(shared)
    np.testing.assert_array_equal(run(layer), before)


def test_some_experts_of_a_torch_trainer(path):
    torch = pytest.importorskip("torch")
    new = {name: torch.from_numpy(array) for name, array in weights_of(2).items()}
    named = [5, 2]
    part = {name: new[name][named] for name in ("gate_up", "down")}
    writer = conclave.SharedWeightsWriter(path, SPEC, experts=named, **part)
    writer.publish(**part)
    with pytest.raises(conclave.ConclaveValueError, match="same arrays"):
        writer.publish(**part, router=new["router"])
    with pytest.raises(conclave.ConclaveValueError, match="gate_up: expected 2"):
        writer.publish(**{**part, "gate_up": new["gate_up"]})
    shared = conclave.SharedWeights(path)
    assert shared.tensors["down"] == (2, 5)
    old = weights_of(1)
    layer = layer_of(old)
    with layer.refit(experts=named) as refit:
        refit.stage(shared)
    for name in part:
        old[name][named] = part[name].numpy()
    np.testing.assert_array_equal(run(layer), run(layer_of(old)))
    with pytest.raises(conclave.ConclaveCheckpointError, match="lack"), layer.refit() as refit:
        refit.stage(shared)


def test_other_files_are_refused(path):
    path.write_bytes(b"CNCLVSW1" + bytes(500))
    with pytest.raises(conclave.ConclaveValueError, match="size"):
        conclave.SharedWeights(path)
    with pytest.raises(conclave.ConclaveFileNotFoundError):
        conclave.SharedWeights(path.with_name("none"))


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_one_rank_reach_all(mode):
    fresh = layer_of(weights_of(2))
    expected = run(fresh)

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights_of(1))
        given = weights_of(2) if rank == 1 else {}
        with layer.refit(mode=mode) as refit:
            for part in ([0, 3, 5], [1, 2, 4]):
                own = {name: given[name][part] for name in given if name != "router"}
                refit.stage(experts=part, communicator=experts, root=1, **own)
            own = {"router": given["router"]} if given else {}
            refit.stage(tensors=["router"], communicator=experts, root=1, **own)
        assert layer.stats().refit_epoch == 1
        # From here on each rank reads a source of its own.
        with layer.refit(mode=mode, experts=[2]) as refit:
            arrays = weights_of(2)
            refit.stage(gate_up=arrays["gate_up"][[2]], down=arrays["down"][[2]])
        return run(layer)

    groups = [(each,) for each in conclave.local_group(2)]
    for output in on_ranks(groups, work):
        np.testing.assert_array_equal(output, expected)


def test_a_root_that_fails_is_learnt_of_by_the_others():
    wrong = {**weights_of(2), "down": weights_of(2)["down"][:, :, :-1]}

    def work(rank, experts):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights_of(1))
        before = run(layer)
        refit = layer.refit()
        # A rank that receives has weights of its own, and says so.
        kind = conclave.ConclaveTypeError if rank != 0 else conclave.ConclaveCommError
        with pytest.raises(kind, match="receives"):
            refit.stage(communicator=experts, **wrong)
        with pytest.raises(conclave.Error):
            refit.stage(communicator=experts, **(wrong if rank == 0 else {}))
        # A root that refuses to send ends the others' wait as well.
        kind = conclave.ConclaveTypeError if rank == 0 else conclave.ConclaveCommError
        with pytest.raises(kind, match="experts"):
            refit.stage(communicator=experts, **({"experts": "x"} if rank == 0 else {}))
        # So does a rank that names no rank.
        kind = conclave.ConclaveTypeError if rank == 1 else conclave.ConclaveCommError
        with pytest.raises(kind, match="root"):
            refit.stage(communicator=experts, **({"root": "x"} if rank == 1 else weights_of(2)))
        np.testing.assert_array_equal(run(layer), before)
        with pytest.raises(conclave.Error):
            refit.commit()
        refit.rollback()
        np.testing.assert_array_equal(run(layer), before)

    on_ranks([(each,) for each in conclave.local_group(2)], work)
    with pytest.raises(conclave.ConclaveTypeError, match="communicator"):
        layer_of(weights_of(1)).refit().stage(communicator=3, **weights_of(2))


def _refit_from_root(layer, ranks, given, fails_at, **options):
    """Three stages and a commit; the exception comes before one of them."""
    with layer.refit(**options) as refit:
        for number, part in enumerate(([0, 3, 5], [1, 2, 4])):
            if number == fails_at:
                raise ZeroDivisionError("no step \u00e4")
            own = {name: given[name][part] for name in given if name != "router"}
            refit.stage(experts=part, communicator=ranks, root=0, **own)
        own = {"router": given["router"]} if given else {}
        refit.stage(tensors=["router"], communicator=ranks, root=0, **own)
        if fails_at == 2:
            raise ZeroDivisionError("no step \u00e4")


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_is_told_to_ranks_that_wait_for_weights(shares, fails_at, failing):
    """Over the layer's own communicator, or between layers that nothing else connects."""
    expected = run(layer_of(weights_of(2)))

    def work(rank, ranks):
        own = {"communicator": ranks} if shares else {}
        layer = conclave.Layer.from_tensors(SPEC, **own, **weights_of(1))
        before = run(layer)
        named = {} if shares else {"communicator": ranks}
        given = weights_of(2) if rank == 0 else {}
        kind = ZeroDivisionError if rank == failing else conclave.ConclaveCommError
        with pytest.raises(kind) as raised:
            _refit_from_root(layer, ranks, given, fails_at if rank == failing else -1, **named)
        np.testing.assert_array_equal(run(layer), before)
        _refit_from_root(layer, ranks, given, -1, **named)
        np.testing.assert_array_equal(run(layer), expected)
        return getattr(raised.value, "peer", None), str(raised.value)

    groups = [(each,) for each in conclave.local_group(3, timeout=50)]
    for rank, (peer, text) in enumerate(on_ranks(groups, work)):
        if rank == failing:
            continue
        assert peer == failing
        assert "has withdrawn: ZeroDivisionError: no step \u00e4" in text  # not a deadline


def test_a_rank_without_a_refit_is_heard_by_those_that_wait_for_weights():
    def work(rank, ranks):
        layer = layer_of(weights_of(1))
        before = run(layer)
        raised = []
        for attempt in range(2):
            try:
                if rank == 1 and attempt == 0:
                    layer.withdraw_refit(communicator=ranks, reason="no weights found")
                    continue
                wrong = {"experts": [EXPERTS]} if rank == 1 else {}
                with layer.refit(communicator=ranks, **wrong) as refit:
                    refit.stage(**(weights_of(2) if rank == 0 else {}))
            except conclave.Error as error:
                raised.append(str(error))
        np.testing.assert_array_equal(run(layer), before)
        return raised

    results = on_ranks([(each,) for each in conclave.local_group(2, timeout=50)], work)
    assert "has withdrawn: no weights found" in results[0][0]
    assert "has withdrawn: ConclaveValueError" in results[0][1]
    assert len(results[1]) == 1


class _SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [_SaysNothing(), ValueError("\udc80"), KeyboardInterrupt()])
def test_any_exception_has_a_reason_for_other_ranks(error):
    def work(rank, ranks):
        layer = layer_of(weights_of(1))
        with pytest.raises((type(error), conclave.ConclaveCommError)) as raised:
            with layer.refit(communicator=ranks) as refit:
                if rank == 1:
                    raise error
                refit.stage(**weights_of(2))
        return str(raised.value) if rank == 0 else ""

    told = on_ranks([(each,) for each in conclave.local_group(2, timeout=50)], work)[0]
    assert f"has withdrawn: {type(error).__name__}" in told


def test_replays_keep_out_refits_of_other_threads():
    layer = layer_of(weights_of(1))
    refit = layer.refit()
    refit.stage(**weights_of(2))
    committed = threading.Thread(target=refit.commit)
    with layer.replaying():
        committed.start()
        committed.join(0.1)
        assert committed.is_alive()
        assert layer.stats().refit_epoch == 0
    committed.join(20)
    assert layer.stats().refit_epoch == 1
    overwriting = layer.refit(mode="in_place", experts=[1, 2])
    arrays = weights_of(2)
    overwriting.stage(experts=[1], gate_up=arrays["gate_up"][[1]], down=arrays["down"][[1]])
    with pytest.raises(conclave.ConclaveRuntimeError), layer.replaying():
        pass
