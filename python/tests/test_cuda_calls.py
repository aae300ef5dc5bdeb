"""How calls on a GPU behave: streams, waiting, graphs, memory, other libraries, errors."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)
from support.device import growth, make_device_problem, token_errors  # noqa: E402
from support.problems import HALF_BAR  # noqa: E402

pytestmark = pytest.mark.cuda

A_QUARTER_OF_A_SECOND = 500_000_000  # clocks at 2 GHz


@pytest.fixture
def sync_debug():
    """Sets what torch does where one of its operations waits for the GPU."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_gpu(sync_debug) -> None:
    problem = make_device_problem()
    routed = problem.layer()
    gated = problem.layer(router=torch.randn(16, 256, device="cuda").bfloat16())
    logits = torch.randn(48, 16, device="cuda")

    def calls() -> None:
        routed(problem.hidden, **problem.routing)
        gated(problem.hidden)
        weights, ids, _ = conclave.fused_topk(problem.hidden, logits, 4, True)
        conclave.grouped_topk(problem.hidden, logits, 4, True, 4, 2, "sigmoid")
        conclave.moe_align_block_size(ids, 16, 16)
        rows, _, first, inverse, _ = conclave.moe_permute(problem.hidden, None, ids, 16)
        conclave.moe_unpermute(torch.empty_like(problem.hidden), rows, weights, inverse, first)

    calls()  # kernels are loaded, scratch memory is made
    torch.cuda.synchronize()
    sync_debug("error")
    torch.cuda._sleep(A_QUARTER_OF_A_SECOND)
    asleep = torch.cuda.Event()
    asleep.record()
    calls()
    assert not asleep.query(), "a call waited for earlier work of its stream"
    sync_debug("default")
    torch.cuda.synchronize()


def test_a_stream_can_be_named() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in (side, side.cuda_stream):
        late = torch.zeros_like(problem.hidden)
        out = torch.zeros_like(problem.hidden)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(problem.hidden)
        layer(late, **problem.routing, out=out, stream=stream)
        side.synchronize()
        assert torch.equal(out, expected)


def test_threads_on_streams_of_their_own_have_the_same_bits() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    expected = [layer(problem.hidden, **problem.routing)]
    for tokens in (7, 20):
        hidden, routing = problem.first(tokens)
        expected.append(layer(hidden, **routing))
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(60):
                hidden, routing = problem.first((48, 7, 20)[(index + step) % 3])
                out = layer(hidden, **routing)
                if not torch.equal(out, expected[(index + step) % 3]):
                    failures.append(f"thread {index}, step {step}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("tokens", [1, 48, 1000])
def test_graphs_replay_changed_inputs(tokens: int) -> None:
    problem = make_device_problem(tokens=tokens)
    layer = problem.layer()
    inputs = {n: t.clone() for n, t in (("hidden", problem.hidden), *problem.routing.items())}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(**inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(**inputs)
    for seed in range(3):
        other = make_device_problem(tokens=tokens, seed=seed + 1)
        inputs["hidden"].copy_(other.hidden)
        inputs["topk_ids"].copy_(other.topk_ids)
        inputs["topk_weights"].copy_(other.topk_weights)
        graph.replay()
        other.weights = problem.weights
        assert token_errors(other, out, [0, tokens // 2, tokens - 1]).max() <= HALF_BAR
        assert torch.equal(out, layer(**inputs))


def test_routing_and_permutation_are_captured() -> None:
    logits = torch.randn(40, 16, device="cuda")
    hidden = torch.randn(40, 64, device="cuda")

    def calls() -> list[torch.Tensor]:
        weights, ids, _ = conclave.fused_topk(hidden, logits, 4, True)
        rows, _, first, inverse, index = conclave.moe_permute(hidden, None, ids, 16)
        out = torch.empty_like(hidden)
        conclave.moe_unpermute(out, rows, weights, inverse, first)
        aligned = conclave.moe_align_block_size(ids, 16, 16)
        return [weights, ids, rows, first, inverse, index, out, *aligned]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for _ in range(3):
        logits.normal_()
        hidden.normal_()
        graph.replay()
        for found, expected in zip(captured, calls(), strict=True):
            assert torch.equal(found, expected)


def test_other_libraries_arrays() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    problem = make_device_problem(dtype=torch.float16)
    expected = problem.layer()(problem.hidden, **problem.routing)
    torch.cuda.synchronize()
    weights = {name: cupy.from_dlpack(weight) for name, weight in problem.weights.items()}
    layer = conclave.Layer.from_tensors(problem.spec, **weights)
    assert layer.device == "cuda:0"
    routing = {name: cupy.from_dlpack(tensor) for name, tensor in problem.routing.items()}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = layer(cupy.from_dlpack(problem.hidden), **routing)
        stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(out), expected)


def test_memory_does_not_grow() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    for tokens in (48, 1, 17):
        hidden, routing = problem.first(tokens)
        layer(hidden, **routing)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()

    def calls() -> None:
        for step in range(1000):
            hidden, routing = problem.first((48, 1, 17)[step % 3])
            layer(hidden, **routing)

    assert growth(calls) < 1 << 20
    assert torch.cuda.memory_reserved() == reserved


def test_layers_give_their_memory_back() -> None:
    problem = make_device_problem()
    host = {name: weight.cpu() for name, weight in problem.weights.items()}

    def cycle() -> None:
        layer = conclave.Layer.from_tensors(problem.spec, **host, device="cuda")
        layer(problem.hidden, **problem.routing)
        torch.cuda.synchronize()

    def cycles() -> None:
        for _ in range(20):
            cycle()

    cycle()
    assert growth(cycles) < 4 << 20


def test_arguments_may_go_before_they_are_read() -> None:
    """Their memory goes to who asks next on the same stream, whose work comes behind."""
    problem = make_device_problem(tokens=500)
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing).clone()
    for _ in range(5):
        arguments = {"hidden": problem.hidden.clone()}
        arguments |= {name: tensor.clone() for name, tensor in problem.routing.items()}
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        out = layer(**arguments)
        arguments.clear()
        junk = [torch.full((500, 256), 7.0, device="cuda").bfloat16() for _ in range(4)]
        ids = [torch.full((500, 4), 3, dtype=torch.int32, device="cuda") for _ in range(4)]
        assert torch.equal(out, expected)
        del junk, ids


def test_storage_freed_during_a_call() -> None:
    """Another thread gives the tensors other memory while a call is made."""
    problem = make_device_problem(tokens=500)
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing).clone()
    outputs = []

    def run(tensors: dict[str, torch.Tensor]) -> None:
        try:
            outputs.append(layer(**tensors))
        except conclave.Error:
            outputs.append(None)  # it came too late and found empty tensors

    for attempt in range(40):
        tensors = {"hidden": problem.hidden.clone()}
        tensors |= {name: tensor.clone() for name, tensor in problem.routing.items()}
        torch.cuda.synchronize()
        runner = threading.Thread(target=run, args=(tensors,))
        runner.start()
        time.sleep(0.00001 * attempt)
        for tensor in tensors.values():
            tensor.set_(torch.empty(0, dtype=tensor.dtype, device="cuda").untyped_storage())
        junk = [torch.full((500, 256), 7.0, device="cuda").bfloat16() for _ in range(4)]
        runner.join()
        del junk
    whole = [out for out in outputs if out is not None]
    assert whole
    for out in whole:
        assert torch.equal(out, expected)


FORKED = """
import os, sys, torch, conclave
sys.path.insert(0, {tests!r})
from support.device import make_device_problem
problem = make_device_problem()
layer = problem.layer()
layer(problem.hidden, **problem.routing)
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    try:
        layer._core.forward(problem.hidden, problem.hidden, None, problem.topk_ids,
                            problem.topk_weights)
        os._exit(1)
    except conclave.Error:
        os._exit(0)
    except BaseException as error:
        print(type(error), error, flush=True)
        os._exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
layer(problem.hidden, **problem.routing)
torch.cuda.synchronize()
sys.exit(status)
"""


def test_a_forked_child_is_told() -> None:
    """CUDA does not work in a child of a process that has used it: a typed error, no crash."""
    tests = str(pathlib.Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", FORKED.format(tests=tests)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("in_place", [True, False])
def test_a_layer_may_go_before_its_work_is_done(in_place: bool) -> None:
    problem = make_device_problem()
    weights = dict(problem.weights)
    if not in_place:
        weights = {name: weight.cpu() for name, weight in weights.items()}
    layer = conclave.Layer.from_tensors(problem.spec, **weights, device="cuda")
    expected = layer(problem.hidden, **problem.routing).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    out = layer(problem.hidden, **problem.routing)
    del layer, weights
    problem.weights.clear()
    junk = [torch.full((16, 256, 256), 9.0, device="cuda").bfloat16() for _ in range(4)]
    assert torch.equal(out, expected)
    assert len(junk) == 4


def bad_calls(problem):
    """name: (arguments, what the error names, what was found)."""
    good = {"hidden": problem.hidden, **problem.routing}
    ids, weights = problem.topk_ids, problem.topk_weights
    return {
        "integer rows": ({**good, "hidden": problem.hidden.int()}, "hidden", "I32"),
        "double rows": ({**good, "hidden": problem.hidden.double()}, "hidden", "F64"),
        "columns apart": (
            {**good, "hidden": torch.zeros(48, 512, device="cuda").bfloat16()[:, ::2]},
            "hidden",
            r"stride|apart",
        ),
        "turned": ({**good, "hidden": problem.hidden.T.contiguous().T}, "hidden", "stride|apart"),
        "wrong width": ({**good, "hidden": problem.hidden[:, :128]}, "hidden", "128"),
        "vector": ({**good, "hidden": problem.hidden[0]}, "hidden", "256"),
        "float ids": ({**good, "topk_ids": ids.float()}, "topk_ids", "F32"),
        "wrong k": ({**good, "topk_ids": ids[:, :3]}, "topk_ids|topk_weights", "3"),
        "fewer ids": ({**good, "topk_ids": ids[:40]}, "topk_ids", "40"),
        "integer weights": ({**good, "topk_weights": weights.int()}, "topk_weights", "I32"),
        "host ids": ({**good, "topk_ids": ids.cpu()}, "topk_ids", "cpu"),
        "host rows": ({**good, "hidden": problem.hidden.cpu()}, "hidden", "cpu"),
        "host out": ({**good, "out": torch.empty(48, 256).bfloat16()}, "out", "cpu"),
        "wrong out": ({**good, "out": torch.empty(47, 256, device="cuda")}, "out", "47"),
        "integer out": ({**good, "out": torch.empty_like(problem.hidden).int()}, "out", "I32"),
        "host mask": ({**good, "padding_mask": torch.ones(48).bool()}, "padding_mask", "cpu"),
        "no routing": ({"hidden": problem.hidden}, "router|topk_ids|gate", ""),
    }


def test_bad_arguments_are_named() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    wrong = []
    for name, (arguments, argument, found) in bad_calls(problem).items():
        try:
            layer(**arguments)
            wrong.append(f"{name}: accepted")
        except (ConclaveValueError, ConclaveTypeError, ConclaveUnsupportedError) as error:
            if not (re.search(argument, str(error)) and re.search(found, str(error))):
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    # And the layer is as it was.
    assert torch.equal(layer(problem.hidden, **problem.routing), expected)


def test_bad_weights_are_named() -> None:
    problem = make_device_problem()
    weights = problem.weights
    cases = [
        ({**weights, "down": weights["down"].cpu()}, "down"),
        ({**weights, "down": weights["down"].float()}, "down|gate_up"),
        ({**weights, "gate_up": weights["gate_up"][:, :100]}, "gate_up"),
        ({**weights, "gate_up": weights["gate_up"].int()}, "gate_up"),
    ]
    for given, argument in cases:
        with pytest.raises((ValueError, TypeError), match=argument):
            conclave.Layer.from_tensors(problem.spec, **given)
    with pytest.raises(conclave.Error, match="cuda:99"):
        conclave.Layer.from_tensors(
            problem.spec, **{n: w.cpu() for n, w in weights.items()}, device="cuda:99"
        )


def test_gradients_are_refused() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    hidden = problem.hidden.clone().requires_grad_()
    with pytest.raises(ConclaveValueError, match=r"hidden.*gradients"):
        layer(hidden, **problem.routing)
    with torch.no_grad():
        layer(hidden, **problem.routing)
