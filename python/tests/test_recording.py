"""Recorded routing: rings, files, replay in other batches, comparison."""

from __future__ import annotations

import threading

import numpy
import pytest

import conclave
from conclave.errors import (
    ConclaveCheckpointError,
    ConclaveFileNotFoundError,
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveValueError,
    Error,
)
from support.problems import make_problem

E, K, T = 10, 3, 24
KEYS = numpy.stack([numpy.arange(T) % 4, numpy.arange(T) // 4], axis=1)


@pytest.fixture(scope="module")
def setup():
    problem = make_problem(numpy.random.default_rng(5), experts=E, top_k=K, tokens=T)
    layer = conclave.Layer.from_tensors(problem.spec, **problem.weights, router=problem.router)
    return problem, layer


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_replay_has_the_bits_of_the_forward_that_was_recorded(setup, tmp_path, library):
    problem, layer = setup
    hidden = problem.hidden
    if library == "torch":
        hidden = pytest.importorskip("torch").tensor(hidden)
    recorder = conclave.RoutingRecorder({3: layer}, model="m", model_type="t")
    served = [
        recorder.forward(layer, 3, hidden[first : first + 5], tokens=KEYS[first : first + 5])
        for first in range(0, T, 5)
    ]
    recorder.write(tmp_path / "served.safetensors")
    replay = conclave.RoutingReplay(tmp_path / "served.safetensors")
    assert (replay.record.model, replay.record.model_type) == ("m", "t")
    order = numpy.random.default_rng(0).permutation(T)[:17]
    out = replay.forward(layer, 3, hidden[order], KEYS[order])
    assert type(out) is type(hidden)
    expected = numpy.concatenate([numpy.asarray(part) for part in served])[order]
    numpy.testing.assert_array_equal(numpy.asarray(out), expected)
    assert recorder.recorded_tokens(3) == T and recorder.dropped_tokens(3) == 0


def test_rows_are_copied_out_and_rings_wrap(setup):
    _, layer = setup
    recorder = conclave.RoutingRecorder({1: layer, 0: layer.spec}, capacity=4)
    ids = numpy.arange(6 * K, dtype="int64").reshape(6, K) % E
    weights = numpy.random.default_rng(0).random((6, K)).astype("float32")
    recorder.record(1, ids, weights)
    rows = recorder.snapshot().rows(1)
    numpy.testing.assert_array_equal(rows.tokens, [[0, 2], [0, 3], [0, 4], [0, 5]])
    numpy.testing.assert_array_equal(rows.topk_ids, ids[2:])
    numpy.testing.assert_array_equal(rows.topk_weights, weights[2:])
    assert rows.dropped_tokens == 2 and recorder.snapshot().layers == (0, 1)
    assert rows.spec_hash == recorder.snapshot().rows(0).spec_hash != 0
    assert recorder.snapshot().rows(0).topk_ids.shape == (0, K)
    recorder.clear()
    assert recorder.recorded_tokens(1) == 0


def test_a_full_ring_may_refuse(setup):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer}, capacity=T - 1, when_full="error")
    with pytest.raises(ConclaveRuntimeError, match="full"):
        recorder.forward(layer, 0, problem.hidden)
    assert recorder.recorded_tokens(0) == 0


def test_differences_are_reported(setup, tmp_path):
    problem, layer = setup
    first = conclave.RoutingRecorder({0: layer})
    second = conclave.RoutingRecorder({0: layer})
    first.forward(layer, 0, problem.hidden, tokens=range(T))
    order = numpy.random.default_rng(1).permutation(T)
    second.forward(layer, 0, problem.hidden[order], tokens=order)
    assert conclave.compare_routing(first, second).equal
    rows = first.snapshot().rows(0)
    changed = rows.topk_ids.copy()
    changed[7, 0] = next(e for e in range(E) if e not in changed[7])
    second.record(0, changed[7:8], rows.topk_weights[7:8], tokens=[7])
    first.write(tmp_path / "first")
    found = conclave.compare_routing(tmp_path / "first", second)
    assert not found.equal
    (layer_found,) = found.layers
    assert layer_found.other_experts == 1 and layer_found.compared == T
    assert layer_found.worst_token == (0, 7)
    assert layer_found.worst_weight_difference == pytest.approx(float(rows.topk_weights[7, 0]))
    assert found.examples[0].second_ids == tuple(changed[7].tolist())


def test_threads_record_at_the_same_time(setup):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})

    def serve(sequence):
        for position in range(10):
            keys = [(sequence, position)]
            recorder.forward(layer, 0, problem.hidden[sequence : sequence + 1], tokens=keys)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = recorder.snapshot().rows(0)
    assert len({tuple(key) for key in rows.tokens.tolist()}) == 40


def test_what_cannot_be_is_refused(setup, tmp_path):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})
    ids, weights = problem.topk_ids, problem.topk_weights
    with pytest.raises(ConclaveValueError, match="layer"):
        recorder.record(1, ids, weights)
    with pytest.raises(ConclaveValueError, match="tokens"):
        recorder.record(0, ids, weights, tokens=[])
    with pytest.raises(ConclaveTypeError, match="integers"):
        recorder.record(0, ids, weights, tokens=numpy.zeros((T, 2)))
    with pytest.raises(ConclaveValueError, match=r"\[T, 2\]"):
        recorder.record(0, ids, weights, tokens=numpy.zeros((T, 3), int))
    with pytest.raises(ConclaveTypeError):
        recorder.record(0, ids, weights.astype("float64"))
    with pytest.raises(Error):
        recorder.record(0, ids + 10, weights)
    with pytest.raises(ConclaveValueError, match="drop_oldest"):
        conclave.RoutingRecorder({0: layer}, when_full="never")
    for capacity in (0, 2**70):
        with pytest.raises(ConclaveValueError, match="capacity"):
            conclave.RoutingRecorder({0: layer}, capacity=capacity)
    with pytest.raises(ConclaveTypeError, match="capacity"):
        conclave.RoutingRecorder({0: layer}, capacity=1.5)
    with pytest.raises(ConclaveTypeError, match="layer"):
        conclave.RoutingRecorder({"0": layer})
    with pytest.raises(ConclaveValueError, match="tokens"):
        recorder.record(0, ids, weights, tokens=numpy.full(T, 2**63, "uint64"))
    recorder.record(0, ids, weights)
    replay = conclave.RoutingReplay(recorder)
    with pytest.raises(ConclaveValueError, match="sequence 0, position 99"):
        replay.routing(0, [99])
    with pytest.raises(ConclaveValueError, match="layer"):
        replay.routing(5, [0])
    assert replay.has(0, (0, 3)) and not replay.has(0, (1, 3))
    few = make_problem(numpy.random.default_rng(5), experts=E, top_k=2, tokens=T)
    with pytest.raises(ConclaveValueError):
        replay.forward(few.layer(), 0, few.hidden, range(T))
    with pytest.raises(ConclaveFileNotFoundError):
        conclave.RoutingRecord.open(tmp_path / "none")
    (tmp_path / "text").write_bytes(b"no record at all" * 9)
    with pytest.raises((ConclaveCheckpointError, Error)):
        conclave.RoutingRecord.open(tmp_path / "text")


@pytest.mark.parametrize("count", [4, numpy.array([4])])
def test_rows_behind_num_tokens_are_not_recorded(setup, count):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})
    recorder.forward(layer, 0, problem.hidden, num_tokens=count)
    assert recorder.recorded_tokens(0) == 4


def test_what_is_no_argument_of_its_kind_is_named(setup):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})
    ids, weights = problem.topk_ids, problem.topk_weights
    recorder.record(0, ids, weights)
    replay = conclave.RoutingReplay(recorder)
    calls = {
        "topk_ids": lambda: recorder.record(0, ids.tolist(), weights),
        "topk_weights": lambda: recorder.record(0, ids, None),
        "layer": lambda: recorder.recorded_tokens("0"),
        "layers": lambda: conclave.RoutingRecorder([layer]),
        "when_full": lambda: conclave.RoutingRecorder({0: layer}, when_full=None),
        "model": lambda: conclave.RoutingRecorder({0: layer}, model=5),
        "tokens": lambda: replay.has(0, ("a", "b")),
        "recorded": lambda: conclave.RoutingReplay(5),
        "most_examples": lambda: conclave.compare_routing(recorder, recorder, most_examples="1"),
    }
    for name, call in calls.items():
        with pytest.raises(ConclaveTypeError, match=name):
            call()
    with pytest.raises(ConclaveValueError, match="most_examples"):
        conclave.compare_routing(recorder, recorder, most_examples=-1)
    with pytest.raises(ConclaveValueError, match="tokens"):
        replay.has(0, (1, 2, 3))


@pytest.mark.parametrize(("experts", "top_k"), [(E, K - 1), (E - 1, K)])
def test_a_record_of_another_model_is_refused(setup, experts, top_k):
    problem, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})
    recorder.forward(layer, 0, problem.hidden, tokens=range(T))
    other = make_problem(numpy.random.default_rng(5), experts=experts, top_k=top_k, tokens=T)
    with pytest.raises(ConclaveValueError, match=f"expected {top_k} of {experts} experts"):
        conclave.RoutingReplay(recorder).forward(other.layer(), 0, other.hidden, range(T))


def test_arguments_of_rings_on_a_gpu_are_refused_by_those_of_the_host(setup):
    _, layer = setup
    recorder = conclave.RoutingRecorder({0: layer})
    ids, weights = numpy.zeros((2, K), "int32"), numpy.zeros((2, K), "float32")
    for name, value in (("num_tokens", numpy.ones(1, "int64")), ("stream", 0)):
        with pytest.raises(ConclaveValueError, match=name):
            recorder.record(0, ids, weights, **{name: value})
    assert recorder.recorded_tokens(0) == 0
    with pytest.raises(ConclaveTypeError, match="device"):
        conclave.RoutingRecorder({0: layer}, device=0)
    with pytest.raises(conclave.Error, match="nowhere"):
        conclave.RoutingRecorder({0: layer}, device="nowhere")
