"""The vLLM-shaped calls with CUDA tensors."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveValueError  # noqa: E402
from support.problems import HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    fp8_rows,
    quantise_weights,
    random_case,
    worst_quantised_error,
)

pytestmark = pytest.mark.cuda


def on_gpu(case):
    return [tensor.cuda() for tensor in case]


def check(out, expected):
    assert out.is_cuda and worst_error(out, expected.numpy()) <= HALF_BAR


@pytest.mark.parametrize("size", [(1, 128, 128), (33, 2048, 128), (222, 1024, 256)], ids=str)
@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("top_k", [2, 6])
def test_fused_moe_matrix(size, experts, top_k):
    case = random_case(7, *size, experts, top_k, torch.bfloat16)
    check(conclave.fused_experts(*on_gpu(case)), experts_reference(*case))


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "swigluoai_uninterleave"])
def test_activations(activation):
    case = random_case(7, 33, 256, 256, 8, 4, torch.bfloat16)
    out = conclave.fused_experts(*on_gpu(case), activation=activation)
    check(out, experts_reference(*case, activation))


def test_block_fp8():
    hidden, w1, w2, weights, ids = random_case(11, 64, 256, 512, 8, 4, torch.float32)
    hidden = hidden.bfloat16()
    codes1, scale1, exact1 = quantise_weights(w1, "block")
    codes2, scale2, exact2 = quantise_weights(w2, "block")
    config = conclave.fp8_w8a8_moe_quant_config(
        scale1.cuda(), scale2.cuda(), block_shape=[128, 128]
    )
    out = conclave.fused_experts(
        *on_gpu((hidden, codes1, codes2, weights, ids)), quant_config=config
    )
    case = on_gpu((hidden, exact1, exact2, weights, ids))
    torch.set_default_device("cuda")
    try:
        assert worst_quantised_error(out, *case, quantise=lambda r: fp8_rows(r, 128)) <= HALF_BAR
    finally:
        torch.set_default_device(None)


def test_expert_map_on_the_gpu():
    hidden, w1, w2, weights, ids = random_case(3, 33, 128, 128, 8, 4, torch.bfloat16)
    expert_map = vllm.determine_expert_map(2, 1, 8)[1]
    out = conclave.fused_experts(
        *on_gpu((hidden, w1[4:], w2[4:], weights, ids)),
        global_num_experts=8,
        expert_map=expert_map.cuda(),
    )
    check(out, experts_reference(hidden, w1[4:], w2[4:], weights, ids, expert_map=expert_map))


def test_updates_and_the_end_of_weights():
    vllm.forget_packed_layers()
    case = random_case(3, 33, 128, 128, 8, 4, torch.bfloat16)
    arrays = on_gpu(case)
    check(conclave.fused_experts(*arrays), experts_reference(*case))
    arrays[2].mul_(2)
    case[2].mul_(2)
    check(conclave.fused_experts(*arrays), experts_reference(*case))
    assert vllm.packed_layers() == 1
    arrays[1] = None
    gc.collect()
    assert vllm.packed_layers() == 0


def test_memory_does_not_grow():
    torch.cuda.synchronize()
    for round_number in range(30):
        case = on_gpu(random_case(round_number, 4, 128, 128, 8, 2, torch.bfloat16))
        conclave.fused_experts(*case)
        del case
        gc.collect()
        if round_number == 4:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= before


def test_graph_capture():
    case = on_gpu(random_case(3, 33, 128, 128, 8, 4, torch.bfloat16))
    expected = conclave.fused_experts(*case).clone()
    out = torch.empty_like(case[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        conclave.fused_experts(*case, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_layer():
    with torch.device("cuda"):
        layer = vllm.FusedMoE(8, 2, 128, 128, params_dtype=torch.bfloat16)
        hidden = torch.randn(33, 128, dtype=torch.bfloat16)
        logits = torch.randn(33, 8)
    for param in layer.parameters():
        param.copy_(torch.randn_like(param) / 8)
    weights, ids = torch.topk(torch.softmax(logits.cpu().double(), -1), 2)
    weights = weights / weights.sum(1, keepdim=True)
    case = (hidden, layer.w13_weight, layer.w2_weight)
    check(layer(hidden, logits), experts_reference(*(t.cpu() for t in case), weights, ids))


def test_devices_must_agree():
    case = on_gpu(random_case(3, 9, 128, 128, 8, 4, torch.bfloat16))
    for position, name in ((0, "hidden_states"), (2, "w2"), (3, "topk_weights"), (4, "topk_ids")):
        mixed = list(case)
        mixed[position] = mixed[position].cpu()
        with pytest.raises(ConclaveValueError, match=name if position else "device|expected it on"):
            conclave.fused_experts(*mixed)
