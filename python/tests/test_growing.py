"""Layers behind functions and modules plan for the calls that they see."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import _devices, _growing, vllm  # noqa: E402
from conclave.errors import ConclaveMemoryError, ConclaveValueError  # noqa: E402
from conclave.vllm.experts import experts_layer  # noqa: E402
from support.devices import host_only  # noqa: E402
from support.problems import HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference, random_case, spread_of_roundings  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


def some(tokens: int, seed: int = 3):
    """Tokens, weights and choices of a layer of 4 small experts."""
    return random_case(seed, tokens, 16, 32, 4, 2, torch.bfloat16)


def planned(w1, w2) -> int:
    return experts_layer(w1, w2, 2).layer.plan["max_tokens"]


def check(out, case) -> None:
    assert worst_error(out, experts_reference(*case), spread_of_roundings(*case)) <= HALF_BAR


def test_calls_are_planned_for_the_next_power_of_two():
    case = some(20000)
    hidden, w1, w2, weights, ids = case
    for tokens, expected in ((5, 4096), (4096, 4096), (5000, 8192), (40, 8192), (20000, 16384)):
        part = (hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        check(conclave.fused_experts(*part), part)
        assert planned(w1, w2) == expected


@pytest.mark.parametrize(("device", "limit"), [("cpu", 1 << 30), ("cuda:0", 4 << 30)])
def test_scratch_that_is_kept_has_the_lower_limit(device, limit):
    asked = []
    core = SimpleNamespace(grow_with_calls=lambda *limits: asked.append(limits))
    alone = conclave.ParallelSpec()
    _growing.growing(SimpleNamespace(device=device, _core=core, parallel=alone))
    assert asked == [(16384, limit)]


def test_ranks_that_exchange_rows_keep_their_plan():
    asked = []
    core = SimpleNamespace(grow_with_calls=lambda *limits: asked.append(limits))
    for parallel, grows in (
        (conclave.ParallelSpec(ep_size=2), False),
        (conclave.ParallelSpec(ep_size=2, tp_size=2), False),
        (conclave.ParallelSpec(ep_size=2, reduce="partial"), True),
        (conclave.ParallelSpec(tp_size=2), True),
    ):
        layer = SimpleNamespace(device="cpu", _core=core, parallel=parallel)
        assert _growing.growing(layer) is layer
        assert bool(asked) == grows
        asked.clear()


def test_growing_packs_nothing(monkeypatch):
    hidden, w1, w2, weights, ids = some(9000)
    conclave.fused_experts(hidden[:3], w1, w2, weights[:3], ids[:3])
    layer = experts_layer(w1, w2, 2).layer
    for way in ("from_tensors", "reload"):
        monkeypatch.setattr(conclave.Layer, way, lambda *_, **__: pytest.fail("packed again"))
    conclave.fused_experts(hidden, w1, w2, weights, ids)
    assert experts_layer(w1, w2, 2).layer is layer and layer.plan["max_tokens"] == 16384
    stats = layer.stats()
    assert (stats.forwards, stats.tokens) == (2, 9003)


@host_only
def test_bits_do_not_depend_on_the_plan():
    hidden, w1, w2, weights, ids = some(5000)
    exact = conclave.Layer.from_tensors(
        experts_layer(w1, w2, 2).layer.spec, gate_up=w1, down=w2, options={"max_tokens": 700}
    )
    expected = exact(hidden, topk_ids=ids, topk_weights=weights)
    assert torch.equal(conclave.fused_experts(hidden, w1, w2, weights, ids), expected)
    for tokens in (1, 37, 4096):
        out = conclave.fused_experts(hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        assert torch.equal(out, expected[:tokens])


def test_memory_bounds_the_plan(monkeypatch):
    case = some(9000)
    w1, w2 = case[1:3]
    probe = conclave.Layer.from_tensors(
        experts_layer(w1, w2, 2).layer.spec, gate_up=w1, down=w2, options={"max_tokens": 8192}
    )
    limit = probe.plan["workspace_bytes"]
    vllm.forget_packed_layers()
    for kind, traits in _devices.TRAITS.items():
        bounded = traits._replace(max_workspace_bytes=limit)
        monkeypatch.setitem(_devices.TRAITS, kind, bounded)
    check(conclave.fused_experts(*case), case)
    assert planned(w1, w2) == 8192
    check(conclave.fused_experts(*case), case)
    assert planned(w1, w2) == 8192


def test_weights_that_change_reach_every_plan():
    hidden, w1, w2, weights, ids = case = some(5000)
    first = conclave.fused_experts(*case)
    w1.mul_(0.5)
    out = conclave.fused_experts(*case)
    assert not torch.equal(out, first)
    check(out, case)
    few = (hidden[:7], w1, w2, weights[:7], ids[:7])
    check(conclave.fused_experts(*few), few)


def test_threads_grow_at_once():
    hidden, w1, w2, weights, ids = some(9000)
    sizes = (300, 5000, 9000, 4097)
    conclave.fused_experts(hidden[:1], w1, w2, weights[:1], ids[:1])
    found: dict[int, torch.Tensor] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(sizes))

    def work(tokens: int) -> None:
        try:
            start.wait()
            found[tokens] = conclave.fused_experts(
                hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens]
            )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert planned(w1, w2) == 16384
    for tokens, out in found.items():
        part = (hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        check(out, part)


def test_a_layer_is_planned_for_more_by_hand():
    hidden, w1, w2, weights, ids = case = some(100)
    spec = experts_layer(w1, w2, 2).layer.spec
    layer = conclave.Layer.from_tensors(spec, gate_up=w1, down=w2, options={"max_tokens": 8})
    layer(hidden, topk_ids=ids, topk_weights=weights)
    assert layer.plan["max_tokens"] == 8  # a promise of memory: it does not grow by itself
    layer.plan_for(64)
    assert layer.plan["max_tokens"] == 64
    layer.plan_for(16)
    assert layer.plan["max_tokens"] == 64
    check(layer(hidden, topk_ids=ids, topk_weights=weights), case)
    assert layer.stats().forwards == 2
    with pytest.raises(ConclaveValueError, match="max_tokens"):
        layer.plan_for(1 << 41)
    for tokens in (1 << 36, 1 << 40) if layer.device == "cpu" else ():
        with pytest.raises(ConclaveMemoryError, match=f"max_tokens.*found {tokens}.*limit"):
            layer.plan_for(tokens)
    assert layer.plan["max_tokens"] == 64
    check(layer(hidden, topk_ids=ids, topk_weights=weights), case)


def test_compiled_calls_grow():
    hidden, w1, w2, weights, ids = some(9000)

    def work(scale: torch.Tensor, tokens: int) -> torch.Tensor:
        part = (hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        return conclave.fused_experts(*part) * scale

    compiled = torch.compile(work, backend="eager")
    for tokens in (16, 5000, 9000, 16):
        one = torch.ones((), dtype=torch.bfloat16)
        assert torch.equal(compiled(one, tokens), work(one, tokens))
    assert planned(w1, w2) == 16384


def test_the_module_grows_too():
    layer = vllm.FusedMoE(4, 2, 32, 16, params_dtype=torch.bfloat16)
    hidden, w1, w2, _, _ = some(5000)
    with torch.no_grad():
        layer.w13_weight.copy_(w1)
        layer.w2_weight.copy_(w2)
    logits = torch.randn(5000, 4)
    out = layer(hidden, logits)
    assert planned(layer.w13_weight, layer.w2_weight) == 8192
    parts = zip(hidden.split(999), logits.split(999), strict=True)
    again = torch.cat([layer(rows, scores) for rows, scores in parts])
    assert worst_error(out, again.double()) <= HALF_BAR
