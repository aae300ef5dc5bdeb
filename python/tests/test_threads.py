"""Threads of the caller, threads of the library, forks."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import numpy
import pytest

import conclave
from conclave.errors import ConclaveValueError
from support.problems import make_problem


@pytest.fixture
def big():
    return make_problem(
        numpy.random.default_rng(4), experts=8, top_k=2, hidden=256, inner=128, tokens=300
    )


@pytest.fixture(autouse=True)
def restore_threads():
    yield
    conclave.set_num_threads(None)


def test_concurrent_forwards_have_the_same_bits(big):
    layer = big.layer()
    expected = layer(big.hidden, **big.routing)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(layer, big.hidden, **big.routing) for _ in range(64)]
        for run in runs:
            numpy.testing.assert_array_equal(run.result(), expected)
    assert layer.stats().forwards == 65
    assert sum(layer.stats().expert_load) == 65 * big.topk_ids.size


def test_the_gil_is_released(big):
    """A counter in Python goes on while a layer runs."""
    layer = big.layer()
    stop = threading.Event()
    counted = 0

    def count():
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    hidden = numpy.tile(big.hidden, (40, 1))
    ids = numpy.tile(big.topk_ids, (40, 1))
    weights = numpy.tile(big.topk_weights, (40, 1))
    longest = 0
    for _ in range(3):
        before = counted
        layer(hidden, topk_ids=ids, topk_weights=weights)
        longest = max(longest, counted - before)
    stop.set()
    counter.join()
    # Without the release it could run at most once at each switch of the interpreter.
    assert longest > 20


def test_reload_waits_for_forwards(big, make):
    other = make(numpy.random.default_rng(5), experts=8, top_k=2, hidden=256, inner=128, tokens=300)
    layer = big.layer()
    results = [layer_of.layer()(big.hidden, **big.routing) for layer_of in (big, other)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(layer, big.hidden, **big.routing) for _ in range(40)]
        for weights in [other.weights, big.weights] * 3:
            layer.reload(mode="in_place", **weights)
        for run in runs:
            out = run.result()
            assert any(numpy.array_equal(out, result) for result in results)


def test_number_of_threads_does_not_change_bits(big):
    layer = big.layer()
    outputs = []
    for threads in (1, 2, conclave._conclave.max_threads(), 1):
        conclave.set_num_threads(threads)
        assert conclave.get_num_threads() == min(threads, conclave._conclave.max_threads())
        outputs.append(layer(big.hidden, **big.routing))
    for out in outputs[1:]:
        numpy.testing.assert_array_equal(out, outputs[0])


def test_calls_of_one_thread_alone_have_the_same_bits(big):
    """A few tokens run on the caller's thread, many on all."""
    layer = big.layer()
    expected = layer(big.hidden, **big.routing)
    for tokens in (1, 2, 3, 17):
        part = slice(tokens, 2 * tokens)
        routing = {name: array[part] for name, array in big.routing.items()}
        numpy.testing.assert_array_equal(layer(big.hidden[part], **routing), expected[part])
    small = make_problem(
        numpy.random.default_rng(4), experts=4, top_k=1, hidden=8, inner=8, tokens=8
    )
    layer = small.layer()
    alone = layer(small.hidden, **small.routing)
    tiled = {name: numpy.tile(array, (300, 1)) for name, array in small.routing.items()}
    many = layer(numpy.tile(small.hidden, (300, 1)), **tiled)
    numpy.testing.assert_array_equal(many, numpy.tile(alone, (300, 1)))
    assert sum(layer.stats().expert_load) == 301 * 8


def test_too_many_threads_are_cut():
    conclave.set_num_threads(100_000)
    assert conclave.get_num_threads() == conclave._conclave.max_threads()
    with pytest.raises(ConclaveValueError, match="num_threads"):
        conclave.set_num_threads(0)


def test_torch_says_how_many_threads(torch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert conclave.get_num_threads() == 1
        conclave.set_num_threads(2)
        assert conclave.get_num_threads() == min(2, conclave._conclave.max_threads())
        conclave.set_num_threads(None)
        assert conclave.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment_says_how_many_threads():
    code = "import conclave; print(conclave.get_num_threads())"
    assert run_python(code, OMP_NUM_THREADS="1,4") == "1"
    assert run_python(code, OMP_NUM_THREADS="2", CONCLAVE_NUM_THREADS="1") == "1"
    wrong = "import conclave\ntry: conclave.get_num_threads()\nexcept ValueError as e: print(e)"
    assert "OMP_NUM_THREADS" in run_python(wrong, OMP_NUM_THREADS="many")


def run_in_child(layer, hidden, routing, results):
    results.put(numpy.asarray(layer(hidden, **routing)))


def test_layers_work_in_forked_children(big):
    layer = big.layer()
    expected = layer(big.hidden, **big.routing)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=run_in_child, args=(layer, big.hidden, big.routing, results))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    for _ in children:
        numpy.testing.assert_array_equal(results.get(timeout=60), expected)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    # And the parent is as before.
    numpy.testing.assert_array_equal(layer(big.hidden, **big.routing), expected)


def test_children_of_a_busy_parent(big):
    """Other threads are inside of forwards, with every lock there is, when the process forks."""
    layer = big.layer()
    expected = layer(big.hidden, **big.routing)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            layer(big.hidden, **big.routing)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    big.layer()(big.hidden, **big.routing)
                    layer(big.hidden, **big.routing)
                    layer.reload(mode="in_place", **big.weights)
                    out = layer(big.hidden, **big.routing)
                    status = 0 if numpy.array_equal(out, expected) else 2
                finally:
                    os._exit(status)
            deadline = time.monotonic() + 60
            while True:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    pytest.fail("a forked child hangs")
                time.sleep(0.01)
            assert status == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join()


INTERRUPTED = """
import signal, time, numpy, conclave
# A timer of the kernel's: a thread of ours would wait for its turn on a busy machine.
signal.signal(signal.SIGALRM, signal.default_int_handler)
gate_up = numpy.ones((48, 2 * 1024, 1024), "float32")
down = numpy.ones((48, 1024, 1024), "float32")
spec = conclave.MoeSpec(top_k=2)
def load(interrupt_after=None):
    begin = time.monotonic()
    if interrupt_after is not None:
        signal.setitimer(signal.ITIMER_REAL, interrupt_after)
    try:
        conclave.Layer.from_tensors(spec, gate_up=gate_up, down=down)
        return "finished"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        load.took = time.monotonic() - begin
load()
# A busy machine may hand the signal over only when the load is done: a few tries.
for attempt in range(5):
    try:
        outcome = load(interrupt_after=0.1 * load.took)
        if outcome == "interrupted":
            break
        time.sleep(1)
    except KeyboardInterrupt:  # came after the load
        pass
print(outcome)
small = conclave.Layer.from_tensors(spec, gate_up=gate_up[:2, :64, :32], down=down[:2, :32, :32])
x = numpy.ones((2, 32), "float32")
y = small(x, topk_ids=numpy.zeros((2, 2), "int32"), topk_weights=x[:, :2].copy())
print("still works", y.shape)
"""


def test_ctrl_c_ends_a_load():
    lines = run_python(INTERRUPTED).splitlines()
    assert lines == ["interrupted", "still works (2, 32)"]
