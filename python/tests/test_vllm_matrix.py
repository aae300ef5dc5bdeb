"""Rows of vLLM's test matrix with sizes of their own, beside those in the tests of each call.

What takes a GPU's memory or time there is cut to the same remainders.
"""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    fp8_rows,
    quantise_weights,
    random_case,
)


@pytest.mark.parametrize(
    ("size", "experts", "top_k"),
    [
        ((33, 2048, 128), 192, 6),
        ((1, 128, 128), 192, 2),
        ((8, 256, 128), 256, 8),  # split-k
        ((8200, 64, 511), 8, 2),  # more than a chunk of tokens
    ],
    ids=str,
)
def test_many_experts_and_many_tokens(size, experts, top_k):
    case = random_case(7, *size, experts, top_k, torch.bfloat16)
    assert worst_error(conclave.fused_experts(*case), experts_reference(*case).numpy()) <= HALF_BAR


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("top_k", [1, 8])
def test_float8_ranks_sum_to_the_whole(ranks, top_k):
    """test_cutlass_moe.py: 64 tokens, 16 experts, scales by channel and by token."""
    hidden, w1, w2, weights, ids = random_case(5, 64, 128, 256, 16, top_k, torch.float32)
    hidden = hidden.bfloat16()
    codes1, scale1, exact1 = quantise_weights(w1, "channel")
    codes2, scale2, exact2 = quantise_weights(w2, "channel")
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for rank in range(ranks):
        _, expert_map, _ = vllm.determine_expert_map(ranks, rank, 16)
        held = [e for e in range(16) if expert_map is None or expert_map[e] >= 0]
        config = conclave.fp8_w8a8_moe_quant_config(
            scale1[held], scale2[held], per_act_token_quant=True, per_out_ch_quant=True
        )
        total += conclave.fused_experts(
            hidden,
            codes1[held],
            codes2[held],
            weights,
            ids,
            global_num_experts=16,
            expert_map=expert_map,
            quant_config=config,
        ).double()

    def token(rows):
        return fp8_rows(rows, rows.shape[1])

    expected = experts_reference(hidden, exact1, exact2, weights, ids, quantise=token)
    assert worst_error(total, expected.numpy()) <= HALF_BAR


@pytest.mark.parametrize(
    ("size", "experts", "top_k"),
    [
        ((1, 512, 7168), 2, 1),
        ((7, 1024, 512), 8, 2),
        ((83, 128, 7168), 2, 2),
        ((128, 4608, 128), 2, 1),
        ((2050, 128, 128), 16, 6),
    ],
    ids=str,
)
def test_block_float8(size, experts, top_k):
    hidden, w1, w2, weights, ids = random_case(9, *size, experts, top_k, torch.float32)
    hidden = hidden.bfloat16()
    codes1, scale1, exact1 = quantise_weights(w1, "block")
    codes2, scale2, exact2 = quantise_weights(w2, "block")
    config = conclave.fp8_w8a8_moe_quant_config(scale1, scale2, block_shape=[128, 128])
    out = conclave.fused_experts(hidden, codes1, codes2, weights, ids, quant_config=config)
    expected = experts_reference(
        hidden, exact1, exact2, weights, ids, quantise=lambda rows: fp8_rows(rows, 128)
    )
    assert worst_error(out, expected.numpy()) <= HALF_BAR


@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 2880), (2880, 128)])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_sizes_of_the_cpu(tokens, hidden, inner, activation, bias):
    case = random_case(2, tokens, inner, hidden, 8, 4, torch.bfloat16)
    biases, config = {}, None
    if bias:
        generator = torch.Generator().manual_seed(3)
        shapes = {"w1_bias": (8, 2 * inner), "w2_bias": (8, hidden)}
        biases = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        config = conclave.biased_moe_quant_config(**biases)
    out = conclave.fused_experts(*case, activation=activation, quant_config=config)
    expected = experts_reference(*case, activation, **biases)
    assert worst_error(out, expected.numpy()) <= HALF_BAR


@pytest.mark.parametrize("size", [(1, 128, 256), (32, 512, 512), (222, 128, 256)], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6)])
def test_layer_with_gate_and_shared_experts(size, experts, top_k):
    """test_moe_layer.py on one rank."""
    tokens, inner, width = size
    torch.manual_seed(1)
    gate = torch.nn.Linear(width, experts, bias=False)
    shared = torch.nn.Linear(width, width, bias=False)
    layer = vllm.FusedMoE(experts, top_k, width, inner, gate=gate, shared_experts=shared)
    for param in (layer.w13_weight, layer.w2_weight):
        torch.nn.init.normal_(param, std=0.1)
    hidden = torch.randn(tokens, width) / 10
    with torch.no_grad():
        weights, ids, _ = conclave.fused_topk(hidden, gate(hidden), top_k, renormalize=True)
        routed = experts_reference(hidden, layer.w13_weight, layer.w2_weight, weights, ids)
        expected = routed + shared(hidden).double()
        assert worst_error(layer(hidden), expected.numpy()) <= FLOAT32_BAR


@pytest.mark.parametrize("tokens", [1, 33, 1024, 5000])
@pytest.mark.parametrize("width", [2048, 7168])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (64, 6), (256, 8)])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_permute_and_unpermute(tokens, width, experts, top_k, ranks):
    """The last rank's rows: of a token, each local expert one."""
    width = width // 64 if tokens > 1024 else width // 8
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices.int()
    local, expert_map, _ = vllm.determine_expert_map(ranks, ranks - 1, experts)
    rows, _, first, inverse, index = conclave.moe_permute(
        hidden, None, ids, experts, local, expert_map
    )
    flat = ids.flatten().long()
    mapped = flat if expert_map is None else torch.as_tensor(expert_map).long()[flat]
    mine = torch.nonzero(mapped >= 0).flatten()
    order = mine[torch.argsort(mapped[mine], stable=True)]
    assert int(first[-1]) == len(order) and torch.equal(index[: len(order)].long(), order)
    assert torch.equal(rows[: len(order)], hidden[order // top_k])
    assert first.diff().tolist() == torch.bincount(mapped[mine], minlength=local).tolist()
    weights = torch.rand(tokens, top_k, generator=generator)
    out = torch.empty_like(hidden)
    conclave.moe_unpermute(out, rows, weights, inverse.view(tokens, top_k), first)
    share = (weights.double() * (mapped >= 0).view(tokens, top_k)).sum(1, keepdim=True)
    expected = hidden.double() * share
    error = (out.double() - expected).norm(dim=1)
    assert bool((error <= HALF_BAR * expected.norm(dim=1)).all())


@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 2), (257, 16), (160, 32)])
@pytest.mark.parametrize("block_size", [32, 128])
def test_align_block_size(tokens, experts, top_k, block_size):
    random = numpy.random.default_rng(tokens)
    ids = numpy.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype("int32")
    first, second = (conclave.moe_align_block_size(ids, block_size, experts) for _ in range(2))
    assert all(numpy.array_equal(a, b) for a, b in zip(first, second, strict=True))
    slots, blocks, end = first
    counts = numpy.bincount(ids.ravel(), minlength=experts)
    assert int(end[0]) == int((-(-counts // block_size) * block_size).sum())
    owner = numpy.repeat(blocks[: end[0] // block_size], block_size)
    used = slots[: end[0]] < ids.size
    assert numpy.array_equal(ids.ravel()[slots[: end[0]][used]], owner[used])
    assert numpy.array_equal(numpy.sort(slots[: end[0]][used]), numpy.arange(ids.size))
