"""Layers on a GPU that plan for the calls they see: graphs, memory, compiled calls."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave.vllm.experts import experts_layer  # noqa: E402
from support.problems import HALF_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.cuda


class Case:
    """Weights of 8 experts on the GPU, and many tokens with their choices."""

    def __init__(self, tokens: int = 9000, hidden: int = 256, inner: int = 128) -> None:
        make = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make, device="cuda")

        self.w1 = (normal(8, 2 * inner, hidden) / hidden**0.5).bfloat16()
        self.w2 = (normal(8, hidden, inner) / inner**0.5).bfloat16()
        self.hidden = normal(tokens, hidden).bfloat16()
        self.weights, ids = normal(tokens, 8).softmax(-1).topk(2)
        self.ids = ids.int()

    def run(self, tokens: int, **arguments) -> torch.Tensor:
        return conclave.fused_experts(
            self.hidden[:tokens],
            self.w1,
            self.w2,
            self.weights[:tokens].contiguous(),
            self.ids[:tokens].contiguous(),
            **arguments,
        )

    def expected(self, tokens: int) -> torch.Tensor:
        rows = self.hidden[:tokens].double()
        gate, up = torch.einsum("th,enh->ten", rows, self.w1.double()).chunk(2, -1)
        each = torch.einsum("ten,ehn->teh", torch.nn.functional.silu(gate) * up, self.w2.double())
        chosen = each.gather(1, self.ids[:tokens].long()[..., None].expand(-1, -1, rows.shape[1]))
        return (chosen * self.weights[:tokens].double()[..., None]).sum(1)

    def check(self, out: torch.Tensor) -> None:
        assert worst_error(out, self.expected(out.shape[0])) <= HALF_BAR

    def planned(self) -> int:
        return experts_layer(self.w1, self.w2, 2).layer.plan["max_tokens"]


def captured(case: Case, tokens: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(tokens)
    return graph, out


def test_a_call_is_captured_without_a_warm_up_of_its_size():
    case = Case()
    case.check(case.run(16))
    assert case.planned() == 4096
    graph, out = captured(case, 5000)
    assert case.planned() == 8192
    for _ in range(2):
        case.hidden.normal_()
        graph.replay()
        torch.cuda.synchronize()
        case.check(out)


def test_graphs_of_smaller_plans_stay_right():
    case = Case()
    case.run(16)
    graphs = [captured(case, tokens) for tokens in (1, 16, 3000)]
    case.check(case.run(9000))
    graphs.append(captured(case, 9000))
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.full((64 << 20,), 3.0, device="cuda")  # on what was given back
    for _ in range(2):
        case.hidden.normal_()
        for graph, _ in reversed(graphs):
            graph.replay()
        case.run(4999)
        torch.cuda.synchronize()
        for _, out in graphs:
            case.check(out)
    del junk


def test_scratch_comes_from_torch_and_goes_back():
    case = Case(tokens=16384, hidden=1024, inner=512)
    case.run(16)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    free_before = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    out = case.run(16384)
    torch.cuda.synchronize()
    rows = 16384 * 2
    buffers = rows * (3 * 512 + 1024) * 2  # those of vLLM
    peak = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert 0 < peak <= buffers + (1 << 20)
    assert torch.cuda.memory_allocated() - before <= out.numel() * 2 + (1 << 20)
    case.check(out[:600])
    del out
    gc.collect()
    torch.cuda.empty_cache()
    kept = free_before - torch.cuda.mem_get_info()[0]
    assert kept <= 8 << 20, "scratch memory was kept"


def test_layers_share_scratch():
    cases = [Case(tokens=8192, hidden=1024, inner=512) for _ in range(3)]
    for case in cases:
        case.run(16)
    torch.cuda.synchronize()
    peaks = []
    for some in (cases[:1], cases):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for case in some:
            case.run(8192)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] + (1 << 20)


def test_streams_do_not_share_scratch():
    case = Case(tokens=9000)
    case.run(9000)
    expected = case.run(9000)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outputs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(case.run(9000))
        named = torch.empty_like(expected)
        torch.cuda.synchronize()
        outputs.append(case.run(9000, out=named, stream=streams[0]))
    torch.cuda.synchronize()
    for out in outputs:
        assert torch.equal(out, expected)


def test_compiled_calls_grow():
    case = Case()
    case.run(16)

    def work(scale: torch.Tensor, tokens: int) -> torch.Tensor:
        return case.run(tokens) * scale

    compiled = torch.compile(work)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    for tokens in (16, 5000, 9000, 16):
        case.check(compiled(one, tokens))
    assert case.planned() == 16384


@pytest.mark.parametrize("top_k", [33, 60, 64])
def test_many_choices_by_logits_are_those_of_the_cpu(top_k: int):
    make = torch.Generator().manual_seed(top_k)
    logits = torch.randn(33, 64, generator=make)
    weights, ids = conclave.route(logits, top_k, conclave.RouterSpec())
    on_gpu = conclave.route(logits.cuda(), top_k, conclave.RouterSpec())
    assert torch.equal(on_gpu[1].cpu(), ids)
    torch.testing.assert_close(on_gpu[0].cpu(), weights, rtol=2**-22, atol=0)
    tensors = {
        "gate_up": torch.randn(64, 64, 64, generator=make) / 8,
        "down": torch.randn(64, 64, 32, generator=make) / 6,
    }
    layer = conclave.Layer.from_tensors(
        conclave.MoeSpec(top_k=top_k, has_gate=False),
        **{name: tensor.bfloat16().cuda() for name, tensor in tensors.items()},
    )
    hidden = torch.randn(33, 64, generator=make).bfloat16().cuda()
    by_logits = layer(hidden, router_logits=logits.cuda())
    given = layer(hidden, topk_ids=on_gpu[1], topk_weights=on_gpu[0])
    assert torch.equal(by_logits, given)
