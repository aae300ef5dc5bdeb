"""Memory that is borrowed stays as long as it is needed and not longer."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
import weakref

import numpy

import conclave
from support.problems import make_problem


class Array(numpy.ndarray):
    """An array whose end can be seen."""


def watched(array: numpy.ndarray) -> tuple[numpy.ndarray, weakref.ref]:
    copy = array.copy().view(Array)
    return copy, weakref.ref(copy)


def test_weights_are_let_go_after_packing(problem):
    gate_up, gone = watched(problem.gate_up)
    layer = conclave.Layer.from_tensors(problem.spec, gate_up=gate_up, down=problem.down)
    del gate_up
    gc.collect()
    assert gone() is None
    layer(problem.hidden, **problem.routing)


def test_arguments_are_let_go_after_a_call(problem):
    layer = problem.layer()
    hidden, gone = watched(problem.hidden)
    before = sys.getrefcount(problem.topk_ids)
    layer(hidden, **problem.routing)
    after = sys.getrefcount(problem.topk_ids)
    assert after == before
    del hidden
    gc.collect()
    assert gone() is None


def test_arguments_are_let_go_after_an_error(problem):
    layer = problem.layer()
    hidden, gone = watched(problem.hidden)
    for _ in range(3):
        try:
            layer(hidden, topk_ids=problem.topk_ids[:-1], topk_weights=problem.topk_weights)
        except conclave.Error:
            pass
    del hidden
    gc.collect()
    assert gone() is None


def test_layers_are_let_go(problem):
    layer = problem.layer()
    gone = weakref.ref(layer)
    layer(problem.hidden, **problem.routing)
    del layer
    gc.collect()
    assert gone() is None


def test_storage_freed_during_a_call(torch):
    """Another thread gives the tensors other memory while the layer reads them."""
    problem = make_problem(
        numpy.random.default_rng(1), experts=8, top_k=4, hidden=256, inner=256, tokens=2048
    )
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    outputs = []

    def run(tensors):
        try:
            outputs.append(layer(**tensors))
        except conclave.Error:
            outputs.append(None)  # it came too late and found empty tensors

    for attempt in range(20):
        tensors = {
            "hidden": torch.tensor(problem.hidden),
            "topk_ids": torch.tensor(problem.topk_ids),
            "topk_weights": torch.tensor(problem.topk_weights),
        }
        runner = threading.Thread(target=run, args=(tensors,))
        runner.start()
        time.sleep(0.0002 * attempt)
        for tensor in tensors.values():
            tensor.set_(torch.empty(0, dtype=tensor.dtype).untyped_storage())
        junk = [torch.full((2048, 256), float("nan")) for _ in range(4)]
        runner.join()
        del junk
    whole = [out for out in outputs if out is not None]
    assert whole
    for out in whole:
        numpy.testing.assert_array_equal(out.numpy(), expected)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_ten_thousand_calls_do_not_grow(problem):
    layer = problem.layer()
    logits = numpy.zeros((9, 6), "float32")

    def call():
        layer(problem.hidden, **problem.routing)
        conclave.fused_topk(None, logits, 2, True)
        try:
            layer(problem.hidden[:, :-1].copy(), **problem.routing)
        except conclave.Error:
            pass

    for _ in range(1000):
        call()
    gc.collect()
    before = resident_bytes()
    for _ in range(10_000):
        call()
    gc.collect()
    assert resident_bytes() - before < 1 << 20


def test_two_hundred_layers_do_not_grow():
    problem = make_problem(numpy.random.default_rng(0), hidden=128, inner=128)

    def make():
        layer = problem.layer()
        layer(problem.hidden, **problem.routing)
        layer.reload(**problem.weights)

    for _ in range(50):
        make()
    gc.collect()
    before = resident_bytes()
    for _ in range(200):
        make()
    gc.collect()
    # One layer has 1.2 MB of weights.
    assert resident_bytes() - before < 8 << 20


def test_dlpack_capsules_are_released_once(problem):
    released = []

    class Producer:
        shape = problem.hidden.shape
        dtype = problem.hidden.dtype

        def __init__(self) -> None:
            self.array = problem.hidden.copy().view(Array)
            weakref.finalize(self.array, released.append, "memory")

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

    layer = problem.layer()
    for count in range(1, 4):
        producer = Producer()
        layer(producer, **problem.routing)
        del producer
        gc.collect()
        assert len(released) == count
