"""CUDA tensors: the current stream, graphs, several streams, weights in place."""

from __future__ import annotations

import gc
import resource

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from support.problems import HALF_BAR, expected_output, make_problem, worst_error

pytestmark = pytest.mark.cuda


class Case:
    """A bf16 layer on the GPU, its tokens there, and the float64 result."""

    def __init__(self, torch) -> None:
        problem = make_problem(
            numpy.random.default_rng(0), experts=16, top_k=4, hidden=256, inner=128, tokens=48
        )
        self.problem = problem
        self.weights = {n: torch.tensor(w).bfloat16().cuda() for n, w in problem.weights.items()}
        self.hidden = torch.tensor(problem.hidden).bfloat16().cuda()
        self.ids = torch.tensor(problem.topk_ids).cuda()
        self.routing = {
            "topk_ids": self.ids,
            "topk_weights": torch.tensor(problem.topk_weights).cuda(),
        }
        self.expected = expected_output(
            self.hidden.cpu().double(),
            self.weights["gate_up"].cpu().double(),
            self.weights["down"].cpu().double(),
            problem.topk_ids,
            problem.topk_weights,
        )

    def layer(self, **arguments):
        return conclave.Layer.from_tensors(self.problem.spec, **self.weights, **arguments)


@pytest.fixture
def case(torch):
    return Case(torch)


def test_matches_float64(case, torch):
    layer = case.layer()
    assert layer.device == "cuda:0"
    out = layer(case.hidden, **case.routing)
    assert out.device == case.hidden.device and out.dtype == torch.bfloat16
    assert worst_error(out, case.expected) <= HALF_BAR
    for tokens in (0, 1, 7, 48):
        part = layer(case.hidden[:tokens], **{n: t[:tokens] for n, t in case.routing.items()})
        assert worst_error(part, case.expected[:tokens]) <= HALF_BAR


def test_weights_are_used_in_place(case, torch):
    before = torch.cuda.mem_get_info()[0]
    layer = case.layer()
    used = before - torch.cuda.mem_get_info()[0]
    total = sum(w.numel() * 2 for w in case.weights.values())
    assert used < 64 << 20 and total > 0
    case.weights = {}
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.full((total,), 7.0, device="cuda")
    out = layer(case.hidden, **case.routing)
    assert worst_error(out, case.expected) <= HALF_BAR
    del junk


def test_runs_on_the_current_stream(case, torch):
    layer = case.layer()
    layer(case.hidden, **case.routing)
    side = torch.cuda.Stream()
    hidden = torch.zeros_like(case.hidden)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        hidden.copy_(case.hidden)
        out = layer(hidden, **case.routing)
        result = out.clone()
    side.synchronize()
    assert worst_error(result, case.expected) <= HALF_BAR


def test_two_streams_at_once(case, torch):
    layer = case.layer()
    expected = layer(case.hidden, **case.routing)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(layer(case.hidden, **case.routing))
    torch.cuda.synchronize()
    for out in outputs:
        assert torch.equal(out, expected)


def test_graphs_replay(case, torch):
    layer = case.layer()
    hidden = case.hidden.clone()
    layer(hidden, **case.routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden, **case.routing)
    for scale in (1.0, 0.5):
        hidden.copy_(case.hidden * scale)
        graph.replay()
        # Calls outside of the graph do not disturb it.
        again = layer(hidden, **case.routing)
        torch.cuda.synchronize()
        assert torch.equal(out, again)


def test_host_weights_run_there_too(case):
    weights = {n: w.cpu() for n, w in case.weights.items()}
    layer = conclave.Layer.from_tensors(case.problem.spec, **weights, device="cuda")
    out = layer(case.hidden, **case.routing)
    assert worst_error(out, case.expected) <= HALF_BAR


def test_stats_are_counted_where_asked(case, torch):
    layer = case.layer(count=True)
    layer(case.hidden, **case.routing)
    torch.cuda.synchronize()
    load = torch.bincount(case.ids.reshape(-1).long(), minlength=16).tolist()
    assert list(layer.stats().expert_load) == load
    assert case.layer().stats().expert_load is None


def test_devices_are_not_mixed(case):
    layer = case.layer()
    with pytest.raises(ConclaveValueError, match=r"topk_ids.*cuda:0.*cpu"):
        layer(case.hidden, topk_ids=case.ids.cpu(), topk_weights=case.routing["topk_weights"])
    with pytest.raises(ConclaveValueError, match=r"hidden.*cuda:0.*cpu"):
        layer(case.hidden.cpu(), **case.routing)
    host = case.problem.layer()
    with pytest.raises(ConclaveValueError, match=r"hidden.*cpu.*cuda:0"):
        host(case.hidden, **case.routing)
    with pytest.raises(ConclaveValueError, match="down"):
        conclave.Layer.from_tensors(
            case.problem.spec, gate_up=case.weights["gate_up"], down=case.weights["down"].cpu()
        )
    with pytest.raises((ConclaveValueError, ConclaveTypeError), match="num_tokens"):
        layer(case.hidden, **case.routing, num_tokens=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_routing_equals_the_cpu(torch, dtype):
    logits = torch.randn(200, 128).to(getattr(torch, dtype))
    bias = torch.randn(128)
    on_gpu = conclave.fused_topk(None, logits.cuda(), 8, True)
    on_cpu = conclave.fused_topk(None, logits, 8, True)
    assert torch.equal(on_gpu[1].cpu(), on_cpu[1]) and torch.equal(on_gpu[2].cpu(), on_cpu[2])
    assert torch.allclose(on_gpu[0].cpu(), on_cpu[0], rtol=1e-6)
    arguments = (8, True, 8, 4, "sigmoid", 2.5)
    weights, ids = conclave.grouped_topk(
        None, logits.cuda(), *arguments, e_score_correction_bias=bias.cuda()
    )
    expected = conclave.grouped_topk(None, logits, *arguments, e_score_correction_bias=bias)
    assert torch.equal(ids.cpu(), expected[1])
    assert torch.allclose(weights.cpu(), expected[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["hash", "sparse_mixer", "simulated"])
def test_other_routers_equal_the_cpu(torch, name):
    logits = torch.randn(33, 16)
    table = torch.stack([torch.randperm(16)[:2] for _ in range(30)]).int()
    words = torch.randint(0, 30, (33,))
    router = {
        "hash": conclave.RouterSpec(name="hash", score="sqrtsoftplus", vocab_size=30),
        "sparse_mixer": conclave.RouterSpec(name="sparse_mixer", jitter_epsilon=0.1),
        "simulated": conclave.RouterSpec(
            name="simulated", simulated=conclave.SimulatedRouting(distribution="zipf", seed=5)
        ),
    }[name]
    more = {"token_ids": words, "hash_table": table} if name == "hash" else {}
    expected = conclave.route(logits, 2, router, **more)
    found = conclave.route(logits.cuda(), 2, router, **{n: t.cuda() for n, t in more.items()})
    assert torch.equal(found[1].cpu(), expected[1])
    assert torch.allclose(found[0].cpu(), expected[0], rtol=1e-6)
    if name == "hash":
        more["token_ids"] = torch.full_like(words, 30)  # no row of the table
        ids = conclave.route(logits.cuda(), 2, router, **{n: t.cuda() for n, t in more.items()})[1]
        assert (ids == -1).all()


def test_recorded_routing_is_not_replayed(torch):
    recorded = conclave.SimulatedRouting(distribution="replay", replay_ids=(0, 1, 2, 3))
    router = conclave.RouterSpec(name="simulated", simulated=recorded)
    with pytest.raises(ConclaveUnsupportedError, match="replay"):
        conclave.route(torch.randn(3, 16, device="cuda"), 2, router)


def test_tuning_tables_choose_kernels(case, torch):
    rung = case.layer().plan["ladder"][-1]
    name = torch.cuda.get_device_name()
    text = (
        f"conclave-tuning 1\n{name} | bf16 | E 16 H 256 I 128 k 4 | T 4096 | {rung['kernel']} | "
        f"{rung['tile']} | 1.0\n"
    )
    layer = case.layer(options=conclave.LayerOptions(tuning=conclave.TuningTable.parse(text)))
    # The kernel of one launch for a few tokens has no tile to choose.
    ladder = [r for r in layer.plan["ladder"] if r["tile"]]
    assert {(r["kernel"], r["tile"]) for r in ladder} == {(rung["kernel"], rung["tile"])}
    assert all("tuning" in r["reason"] for r in ladder)
    assert worst_error(layer(case.hidden, **case.routing), case.expected) <= HALF_BAR


@pytest.mark.parametrize("tokens", [1, 48])
def test_every_tuning_candidate_can_be_chosen(case, torch, tokens):
    plain = case.layer(options={"max_tokens": tokens})
    entries = conclave.tuning_candidates(plain.spec, tokens, device="cuda:0")
    choices = [(e["kernel"], e["tile"]) for e in entries]
    rung = plain.plan["ladder"][-1]
    assert (rung["kernel"], rung["tile"]) in choices and len(set(choices)) == len(choices) > 1
    for entry, choice in zip(entries, choices, strict=True):
        table = conclave.TuningTable([entry])
        layer = case.layer(options={"max_tokens": tokens, "tuning": table})
        rung = layer.plan["ladder"][-1]
        assert (rung["kernel"], rung["tile"]) == choice
        routing = {n: t[:tokens] for n, t in case.routing.items()}
        out = layer(case.hidden[:tokens], **routing)
        assert worst_error(out, case.expected[:tokens]) <= HALF_BAR


def test_tuning_candidates_need_a_layer_that_runs(case):
    spec = case.layer().spec
    with pytest.raises(ConclaveUnsupportedError):
        conclave.tuning_candidates(
            spec, 4, device="cuda:0", options={"kernel": "cuda.stream_fp8_sm90"}
        )


def test_permutation_equals_the_cpu(torch):
    ids = torch.randint(-1, 17, (100, 4))
    hidden = torch.randn(100, 32)
    for a, b in zip(
        conclave.moe_align_block_size(ids, 16, 16),
        conclave.moe_align_block_size(ids.cuda(), 16, 16),
        strict=True,
    ):
        assert torch.equal(a, b.cpu())
    host = conclave.moe_permute(hidden, None, ids, 16)
    device = conclave.moe_permute(hidden.cuda(), None, ids.cuda(), 16)
    for a, b in zip(host, device, strict=True):
        assert a is b is None or torch.equal(a, b.cpu())
    weights = torch.rand(100, 4)
    out, other = torch.empty(100, 32), torch.empty(100, 32, device="cuda")
    conclave.moe_unpermute(out, host[0], weights, host[3], host[2])
    conclave.moe_unpermute(other, device[0], weights.cuda(), device[3], device[2])
    assert torch.allclose(out, other.cpu(), rtol=1e-6, atol=1e-6)


def test_ten_thousand_calls_do_not_grow(case, torch):
    from support.device import growth

    layer = case.layer()

    def calls(count=10_000):
        for _ in range(count):
            layer(case.hidden, **case.routing)
        torch.cuda.synchronize()

    calls(1000)
    resident = resident_bytes()
    assert growth(calls) < 1 << 20
    assert resident_bytes() - resident < 1 << 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
