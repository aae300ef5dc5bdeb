"""CUDA: limits of a call's choices, and routing that is recorded in rings on the GPU."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveRuntimeError, ConclaveUnsupportedError, ConclaveValueError
from support.problems import make_problem

pytestmark = pytest.mark.cuda

E, K, T = 16, 4, 48


class Case:
    """The same layer with a gate on both devices, and tokens on the GPU."""

    def __init__(self, torch) -> None:
        problem = make_problem(
            numpy.random.default_rng(3), experts=E, top_k=K, hidden=256, inner=128, tokens=T
        )
        weights = {n: torch.tensor(w).bfloat16() for n, w in problem.weights.items()}
        router = torch.tensor(problem.router)
        self.torch = torch
        self.host = conclave.Layer.from_tensors(problem.spec, **weights, router=router)
        there = {n: w.cuda() for n, w in weights.items()}
        self.layer = conclave.Layer.from_tensors(problem.spec, **there, router=router.cuda())
        self.hidden = torch.tensor(problem.hidden).bfloat16().cuda()

    def routed(self, **limits):
        """Ids and weights of a call on the GPU, and those of the host on the same logits."""
        torch = self.torch
        logits = torch.empty((T, E), dtype=torch.float32, device="cuda")
        ids = torch.empty((T, K), dtype=torch.int32, device="cuda")
        weights = torch.empty((T, K), dtype=torch.float32, device="cuda")
        captured = {"captured_ids": ids, "captured_weights": weights}
        self.layer(self.hidden, captured_logits=logits, **captured, **limits)
        limits = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in limits.items()}
        own = {n: torch.empty_like(c, device="cpu") for n, c in captured.items()}
        self.host(self.hidden.cpu(), router_logits=logits.cpu(), **own, **limits)
        return (ids.cpu(), weights.cpu()), (own["captured_ids"], own["captured_weights"])


@pytest.fixture
def case(torch):
    return Case(torch)


@pytest.mark.parametrize("form", ["list", "on the host", "on the gpu", "by token", "few", "budget"])
def test_limits_are_those_of_the_host(case, torch, form):
    flags = torch.zeros(E, dtype=torch.bool)
    flags[[0, 3, 7]] = True
    limits = {
        "list": {"banned_experts": [0, 3, 7]},
        "on the host": {"banned_experts": flags},
        "on the gpu": {"banned_experts": flags.cuda(), "top_k": 3},
        "by token": {"banned_experts": flags.repeat(T, 1).cuda()},
        "few": {"top_k": 2},
        "budget": {"expert_budget": 6},
    }[form]
    (ids, weights), (expected_ids, expected_weights) = case.routed(**limits)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=3e-7, atol=0)
    if "banned_experts" in limits:
        assert not numpy.isin(ids.numpy(), [0, 3, 7]).any()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"top_k": 5}, "1 to 4"),
        ({"expert_budget": 3}, "4 to 16"),
        ({"banned_experts": range(13)}, "at least 4"),
        ({"banned_experts": [16]}, "0 to 15"),
        ({"banned_experts": numpy.zeros((T, E), bool)}, "cuda:0"),
    ],
)
def test_what_cannot_be_is_refused(case, limits, text):
    with pytest.raises(ConclaveValueError, match=text):
        case.layer(case.hidden, **limits)


def test_a_router_alone_refuses_them(torch):
    logits = torch.zeros((2, E), device="cuda")
    with pytest.raises(ConclaveUnsupportedError, match="expert_budget"):
        conclave.route(logits, K, conclave.RouterSpec(), expert_budget=6)


def keys_of(rows) -> numpy.ndarray:
    return numpy.stack([numpy.asarray(rows) % 4, numpy.asarray(rows) // 4], axis=1)


def test_a_recorder_on_the_gpu_has_the_rows_of_one_on_the_host(case, torch, tmp_path):
    here = conclave.RoutingRecorder({3: case.layer}, model="m")
    there = conclave.RoutingRecorder({3: case.layer}, model="m", device="cuda:0")
    for first in range(0, T, 7):
        rows = range(first, min(first + 7, T))
        keys = keys_of(rows)
        given = torch.tensor(keys).cuda() if first % 2 else keys
        hidden = case.hidden[first : first + 7]
        out = there.forward(case.layer, 3, hidden, tokens=given)
        assert torch.equal(out, here.forward(case.layer, 3, hidden, tokens=keys))
    assert there.recorded_tokens(3) == T and there.dropped_tokens(3) == 0
    assert conclave.compare_routing(there, here).equal
    there.write(tmp_path / "there.safetensors")
    replay = conclave.RoutingReplay(tmp_path / "there.safetensors")
    order = numpy.random.default_rng(0).permutation(T)[:17]
    ids, weights = replay.routing(3, keys_of(order), like=case.hidden)
    assert ids.is_cuda
    captured = torch.empty_like(ids), torch.empty_like(weights)
    replay.forward(
        case.layer,
        3,
        case.hidden[torch.tensor(order).cuda()],
        keys_of(order),
        captured_ids=captured[0],
        captured_weights=captured[1],
    )
    assert torch.equal(captured[0], ids) and torch.equal(captured[1], weights)
    there.clear()
    assert there.recorded_tokens(3) == 0


def test_a_graph_records_at_each_replay(case, torch):
    recorder = conclave.RoutingRecorder({0: case.layer}, device="cuda:0")
    hidden = case.hidden[:8].clone()
    keys = torch.zeros((8, 2), dtype=torch.int64, device="cuda")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    case.layer(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorder.forward(case.layer, 0, hidden, tokens=keys, num_tokens=count)
    expected = conclave.RoutingRecorder({0: case.layer})
    for first, used in ((0, 8), (8, 3), (16, 5)):
        hidden.copy_(case.hidden[first : first + 8])
        rows = keys_of(range(first, first + 8))
        keys.copy_(torch.tensor(rows))
        count.fill_(used)
        graph.replay()
        expected.forward(case.layer, 0, hidden, tokens=rows[:used], num_tokens=count)
    assert conclave.compare_routing(recorder, expected).equal


def test_what_the_rings_cannot_take_is_refused(case, torch):
    recorder = conclave.RoutingRecorder(
        {0: case.layer}, capacity=4, when_full="error", device="cuda:0"
    )
    ids = torch.zeros((2, K), dtype=torch.int32, device="cuda")
    weights = torch.zeros((2, K), device="cuda")
    with pytest.raises(ConclaveValueError, match=r"topk_ids.*cuda:0.*cpu"):
        recorder.record(0, ids.cpu(), weights)
    with pytest.raises(ConclaveValueError, match="tokens"):
        recorder.record(0, ids, weights, torch.zeros(2, dtype=torch.int64, device="cuda"))
    for _ in range(3):
        recorder.record(0, ids, weights)
    with pytest.raises(ConclaveRuntimeError, match="full"):
        recorder.snapshot()
    recorder.clear()
    recorder.record(0, ids + E, weights)
    with pytest.raises(conclave.Error, match="slot 0"):
        recorder.recorded_tokens(0)
