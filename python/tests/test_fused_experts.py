"""conclave.fused_experts against eager float64, by vLLM's test matrix, and its errors."""

from __future__ import annotations

import gc
import resource
import warnings

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from support.devices import host_only, is_on_gpu, seeded  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, make_problem, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    fp8_rows,
    fp8_static,
    quantise_weights,
    random_case,
    worst_quantised_error,
)

pytestmark = pytest.mark.usefixtures("device")

HALF = {torch.bfloat16, torch.float16}
GATED = ["silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep", "situ"]
PLAIN = ["silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"]


def bar(dtype):
    return HALF_BAR if dtype in HALF else FLOAT32_BAR


def check(actual, expected, dtype):
    assert actual.dtype == dtype
    assert worst_error(actual, expected) <= bar(dtype)


# vLLM's test_moe.py: (M, N, K); its largest cases are cut to the same remainders.
SIZES = [(1, 128, 128), (1, 2048, 128), (33, 2048, 128), (300, 130, 511), (65, 256, 256)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("top_k", [2, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_fused_moe_matrix(size, experts, top_k, dtype):
    case = random_case(7, *size, experts, top_k, dtype)
    check(conclave.fused_experts(*case), experts_reference(*case), dtype)


@pytest.mark.parametrize("ep_size", [2, 4, 5, 16])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_expert_maps_sum_to_the_whole(ep_size, strategy, dtype):
    hidden, w1, w2, weights, ids = random_case(3, 33, 64, 128, 18, 6, dtype)
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for rank in range(ep_size):
        local, expert_map, _ = vllm.determine_expert_map(ep_size, rank, 18, strategy)
        held = [e for e in range(18) if expert_map[e] >= 0]
        assert len(held) == local
        arguments = (hidden, w1[held], w2[held], weights, ids)
        out = conclave.fused_experts(*arguments, global_num_experts=18, expert_map=expert_map)
        expected = experts_reference(*arguments, expert_map=expert_map)
        check(out, expected, dtype)
        assert (out[expected.abs().sum(1) == 0] == 0).all()
        total += expected
    assert worst_error(total, experts_reference(hidden, w1, w2, weights, ids)) < 1e-12


@pytest.mark.parametrize("activation", GATED + PLAIN)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_activations_and_biases(activation, bias, dtype):
    case = random_case(5, 17, 96, 72, 8, 3, dtype, gated=activation in GATED)
    case[1].mul_(8)  # values at which the clamps and curves matter
    biases, config = {}, None
    if bias:
        generator = seeded(1)
        biases = {
            "w1_bias": torch.randn(case[1].shape[:2], generator=generator).to(dtype),
            "w2_bias": torch.randn(case[2].shape[:2], generator=generator).to(dtype),
        }
        config = conclave.biased_moe_quant_config(**biases)
    out = conclave.fused_experts(*case, activation=activation, quant_config=config)
    check(out, experts_reference(*case, activation, **biases), dtype)


@pytest.mark.parametrize("which", ["w1_bias", "w2_bias"])
def test_one_bias_alone(which):
    case = random_case(5, 9, 24, 40, 6, 2, torch.float32)
    bias = {which: torch.randn(case[1 if which == "w1_bias" else 2].shape[:2])}
    config = vllm.FusedMoEQuantConfig.make(**bias)
    check(
        conclave.fused_experts(*case, quant_config=config),
        experts_reference(*case, **bias),
        torch.float32,
    )


def test_parameters_of_the_activation_are_never_dropped():
    case = random_case(5, 9, 24, 40, 6, 2, torch.float32)
    case[1].mul_(30)
    gate_up = [case[0].double() @ w.double().T for w in case[1]]
    assert max(float(g.abs().max()) for g in gate_up) > 2  # the limit cuts
    config = vllm.FusedMoEQuantConfig.make(gemm1_clamp_limit=0.5)
    limited = conclave.fused_experts(*case, quant_config=config)
    same = conclave.fused_experts(*case, swiglu_limit=0.5)
    free = conclave.fused_experts(*case)
    assert torch.equal(limited, same) and not torch.equal(limited, free)
    with pytest.raises(ConclaveValueError, match="limit"):
        conclave.fused_experts(*case, activation="gelu", quant_config=config)


@pytest.mark.parametrize("top_k", [1, 3])
def test_router_weight_on_input(top_k):
    case = random_case(5, 9, 24, 40, 6, top_k, torch.float32)
    bias = torch.randn(6, 48)
    out = conclave.fused_experts(
        *case,
        apply_router_weight_on_input=True,
        quant_config=conclave.biased_moe_quant_config(bias, None),
    )
    expected = experts_reference(*case, w1_bias=bias, weight_on_input=True)
    check(out, expected, torch.float32)


# The (weights, rows) pairs that vLLM's Triton experts take.
FP8_PAIRS = [
    ("block", "group"),
    ("channel", "token"),
    ("tensor", "token"),
    ("tensor", "static"),
    ("tensor", "dynamic"),
    ("block", "none"),
    ("channel", "none"),
    ("tensor", "none"),
]


def fp8_config(kind, rows, scales, static):
    block = [128, 128] if kind == "block" else None
    if rows == "none":
        return vllm.fp8_w8a16_moe_quant_config(
            *scales, block_shape=block, per_out_ch_quant=kind == "channel"
        )
    return conclave.fp8_w8a8_moe_quant_config(
        *scales,
        a1_scale=static[0] if rows == "static" else None,
        a2_scale=static[1] if rows == "static" else None,
        per_act_token_quant=rows == "token",
        per_out_ch_quant=kind == "channel",
        block_shape=block,
    )


def row_rules(rows, static):
    if rows == "none":
        return None, None
    if rows == "static":
        return (lambda r: fp8_static(r, 0.01)), (lambda r: fp8_static(r, 0.02))
    rule = (lambda r: fp8_rows(r, 128)) if rows == "group" else lambda r: fp8_rows(r, r.shape[1])
    return rule, rule


@pytest.mark.parametrize("pair", FP8_PAIRS, ids="-".join)
@pytest.mark.parametrize("size", [(1, 128, 256), (33, 256, 128), (64, 128, 200)], ids=str)
@pytest.mark.parametrize("top_k", [1, 6])
def test_fp8_pairs(pair, size, top_k):
    kind, rows = pair
    hidden, w1, w2, weights, ids = random_case(11, *size, 8, top_k, torch.float32)
    hidden = hidden.bfloat16()
    codes1, scale1, exact1 = quantise_weights(w1, kind)
    codes2, scale2, exact2 = quantise_weights(w2, kind)
    static = (torch.tensor(0.01), torch.tensor([0.02]))
    quantise, inner = row_rules(rows, static)
    config = fp8_config(kind, rows, (scale1, scale2), static)
    out = conclave.fused_experts(hidden, codes1, codes2, weights, ids, quant_config=config)
    rules = {"quantise": quantise, "quantise_inner": inner}
    assert out.dtype == torch.bfloat16
    error = worst_quantised_error(out, hidden, exact1, exact2, weights, ids, **rules)
    assert error <= HALF_BAR


@pytest.mark.parametrize("block", [(64, 64), (32, 96), (1, 16), (128, 40)], ids=str)
def test_rows_have_groups_as_wide_as_blocks(block):
    hidden, w1, w2, weights, ids = random_case(11, 33, 128, 200, 8, 2, torch.float32)
    codes1, scale1, exact1 = quantise_weights(w1, "block", block)
    codes2, scale2, exact2 = quantise_weights(w2, "block", block)
    config = conclave.fp8_w8a8_moe_quant_config(scale1, scale2, block_shape=list(block))
    out = conclave.fused_experts(hidden, codes1, codes2, weights, ids, quant_config=config)
    # A GPU has rows in groups of 128 columns, and leaves others as they are.
    quantise = None if is_on_gpu() else lambda r: fp8_rows(r, block[1])
    error = worst_quantised_error(out, hidden, exact1, exact2, weights, ids, quantise=quantise)
    assert error <= HALF_BAR


def test_fp8_scales_of_gate_and_up_apart():
    """[E, 2], as checkpoints have them; nothing is quantised again."""
    hidden, w1, w2, weights, ids = random_case(11, 5, 128, 128, 4, 2, torch.float32)
    halves = [quantise_weights(half, "tensor") for half in w1.chunk(2, dim=1)]
    codes2, scale2, exact2 = quantise_weights(w2, "tensor")
    config = vllm.fp8_w8a16_moe_quant_config(torch.stack([h[1] for h in halves], 1), scale2)
    codes1 = torch.cat([h[0].view(torch.uint8) for h in halves], 1).view(torch.float8_e4m3fn)
    out = conclave.fused_experts(hidden, codes1, codes2, weights, ids, quant_config=config)
    exact1 = torch.cat([h[2] for h in halves], 1)
    expected = experts_reference(hidden, exact1, exact2, weights, ids)
    assert worst_error(out, expected) <= HALF_BAR


# Ids, tokens, memory.


@pytest.mark.parametrize("tokens", [0, 1, 2, 129])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_numbers_of_tokens(tokens, ids_dtype):
    hidden, w1, w2, weights, ids = random_case(2, tokens, 40, 48, 10, 5, torch.float32)
    out = conclave.fused_experts(hidden, w1, w2, weights, ids.to(ids_dtype))
    assert out.shape == hidden.shape
    check(out, experts_reference(hidden, w1, w2, weights, ids), torch.float32)


def test_one_hot_expert_and_missing_ids():
    hidden, w1, w2, weights, ids = random_case(2, 40, 40, 48, 60, 3, torch.float32)
    ids[:] = torch.tensor([59, -1, -1], dtype=torch.int32)
    ids[7] = -1
    out = conclave.fused_experts(hidden, w1, w2, weights, ids)
    check(out, experts_reference(hidden, w1, w2, weights, ids), torch.float32)
    assert (out[7] == 0).all()


def test_inplace_and_out():
    case = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    expected = conclave.fused_experts(*case)
    out = torch.empty_like(case[0])
    assert conclave.fused_experts(*case, out=out) is out and torch.equal(out, expected)
    assert conclave.fused_experts(*case, inplace=True) is case[0]
    assert torch.equal(case[0], expected)


@host_only
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy(dtype):
    problem = make_problem(numpy.random.default_rng(3))
    arrays = [a.astype(dtype) for a in (problem.hidden, problem.gate_up, problem.down)]
    out = conclave.fused_experts(*arrays, problem.topk_weights, problem.topk_ids)
    assert isinstance(out, numpy.ndarray) and out.dtype == dtype
    expected = experts_reference(
        *(torch.from_numpy(a) for a in (*arrays, problem.topk_weights, problem.topk_ids))
    )
    assert worst_error(out, expected) <= (FLOAT32_BAR if dtype == "float32" else HALF_BAR)


@host_only
def test_numpy_weights_are_read_at_every_call():
    problem = make_problem(numpy.random.default_rng(3))
    arguments = (problem.hidden, problem.gate_up, problem.down)
    routing = (problem.topk_weights, problem.topk_ids)
    first = conclave.fused_experts(*arguments, *routing)
    problem.down *= 2
    assert numpy.array_equal(conclave.fused_experts(*arguments, *routing), 2 * first)


def test_bfloat16_activations_with_float32_weights():
    hidden, w1, w2, weights, ids = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    hidden = hidden.bfloat16()
    out = conclave.fused_experts(hidden, w1, w2, weights.bfloat16(), ids)
    expected = experts_reference(hidden, w1, w2, weights.bfloat16(), ids)
    check(out, expected, torch.bfloat16)


# The packed layers.


def test_updates_in_place_are_seen():
    case = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    first = conclave.fused_experts(*case)
    case[2].mul_(2)
    assert torch.equal(conclave.fused_experts(*case), 2 * first)
    parameter = torch.nn.Parameter(case[2], requires_grad=False)
    parameter.copy_(case[2] / 2)
    arguments = (case[0], case[1], parameter, case[3], case[4])
    assert torch.equal(conclave.fused_experts(*arguments), first)


def test_static_scales_and_biases_are_part_of_the_weights():
    hidden, w1, w2, weights, ids = random_case(2, 9, 24, 48, 6, 2, torch.float32)
    bias = torch.randn(6, 48)
    config = conclave.biased_moe_quant_config(bias, None)
    first = conclave.fused_experts(hidden, w1, w2, weights, ids, quant_config=config)
    bias.add_(1)
    second = conclave.fused_experts(hidden, w1, w2, weights, ids, quant_config=config)
    assert not torch.equal(first, second)
    expected = experts_reference(hidden, w1, w2, weights, ids, w1_bias=bias)
    check(second, expected, torch.float32)


def test_an_entry_dies_with_its_weights():
    vllm.forget_packed_layers()
    case = list(random_case(2, 9, 40, 48, 6, 2, torch.float32))
    conclave.fused_experts(*case)
    conclave.fused_experts(case[0], case[1][:], case[2].detach(), case[3], case[4])
    assert vllm.packed_layers() == 1  # views of the same storage are the same weights
    conclave.fused_experts(*case, activation="gelu")
    assert vllm.packed_layers() == 2
    case[1] = None
    gc.collect()
    assert vllm.packed_layers() == 0


@host_only
def test_other_memory_at_the_same_place_is_not_taken_for_the_same():
    """Tensors over memory that is not torch's, which two storages may share."""
    vllm.forget_packed_layers()
    case = list(random_case(2, 9, 40, 48, 6, 2, torch.float32))
    memory = case[2].numpy().copy()
    case[2] = torch.from_numpy(memory)
    first = conclave.fused_experts(*case)
    memory *= 2  # unseen by the first tensor's version
    kept, case[2] = case[2], torch.from_numpy(memory)
    assert torch.equal(conclave.fused_experts(*case), 2 * first)
    assert kept.data_ptr() == case[2].data_ptr()


def test_a_parameter_with_new_data_is_new():
    case = list(random_case(2, 9, 40, 48, 6, 2, torch.float32))
    case[2] = torch.nn.Parameter(case[2], requires_grad=False)
    first = conclave.fused_experts(*case)
    case[2].data = case[2].data * 2
    assert torch.equal(conclave.fused_experts(*case), 2 * first)


def test_calls_of_several_threads():
    import threading

    case = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    expected = conclave.fused_experts(*case)
    vllm.forget_packed_layers()
    found, lock = [], threading.Lock()

    def work():
        for _ in range(50):
            same = torch.equal(conclave.fused_experts(*case), expected)
            with lock:
                found.append(same)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(found)
    assert vllm.packed_layers() == 1


def test_inference_tensors_are_read_at_every_call():
    vllm.forget_packed_layers()
    with torch.inference_mode():
        case = [t.clone() for t in random_case(2, 9, 40, 48, 6, 2, torch.float32)]
        first = conclave.fused_experts(*case)
        case[2].mul_(2)
        assert torch.equal(conclave.fused_experts(*case), 2 * first)
    assert vllm.packed_layers() == 0


@host_only
def test_ten_thousand_calls_do_not_grow():
    case = random_case(2, 1, 16, 16, 4, 2, torch.float32)
    for _ in range(1000):
        conclave.fused_experts(*case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        conclave.fused_experts(*case)
    for seed in range(200):  # new weights each time
        conclave.fused_experts(*random_case(seed, 1, 16, 16, 4, 2, torch.float32))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 * 1024  # KiB


# Errors name the argument.


def changed(position, change):
    case = list(random_case(2, 9, 40, 48, 6, 2, torch.float32))
    case[position] = change(case[position])
    return case


@pytest.mark.parametrize(
    ("position", "change", "name", "kind"),
    [
        (0, lambda t: t.double(), "hidden_states", ConclaveTypeError),
        (0, lambda t: t[0], "hidden_states", ConclaveValueError),
        (0, lambda t: t[:, :40], "hidden_states", ConclaveValueError),
        (0, lambda t: t.to(torch.float8_e4m3fn), "hidden_states", ConclaveUnsupportedError),
        (0, lambda t: t.requires_grad_(), "hidden_states", ConclaveValueError),
        (0, lambda t: "x", "hidden_states", ConclaveTypeError),
        (1, lambda t: t[:, :79], "w1", ConclaveValueError),
        (1, lambda t: t[0], "w1", ConclaveValueError),
        (1, lambda t: t.int(), "w1", ConclaveTypeError),
        (2, lambda t: t[:5], "w2", ConclaveValueError),
        (2, lambda t: t[:, :47], "w2", ConclaveValueError),
        (2, lambda t: t.bfloat16(), "w2", ConclaveTypeError),
        (3, lambda t: t[:, :1], "topk_weights", ConclaveValueError),
        (3, lambda t: t.int(), "topk_weights", ConclaveTypeError),
        (4, lambda t: t[:8], "topk_ids", ConclaveValueError),
        (4, lambda t: t.float(), "topk_ids", ConclaveTypeError),
        (4, lambda t: t + 6, "topk_ids", ConclaveValueError),
    ],
)
def test_errors_name_the_argument(position, change, name, kind):
    case = changed(position, change)
    if is_on_gpu() and position == 4 and case[4].dtype == torch.int32 and len(case[4]) == 9:
        # The host cannot see ids there: those of no expert are skipped.
        assert not conclave.fused_experts(*case).any()
        return
    with pytest.raises(kind, match=name) as caught:
        conclave.fused_experts(*case)
    assert isinstance(caught.value, Error)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"activation": "tanh"}, "activation"),
        ({"activation": "relu2"}, "activation"),
        ({"global_num_experts": 7}, "global_num_experts"),
        ({"expert_map": [0, 1, 2]}, None),
        ({"expert_map": [0, 1, 2, 3, 4, 6]}, "expert_map"),
        ({"expert_map": [0, 1, 2, 3, 4, 4]}, "expert_map"),
        ({"expert_map": [0, -1, 2, 3, 4, 5], "global_num_experts": 5}, "expert_map"),
        ({"quant_config": {}}, "quant_config"),
        ({"inplace": True, "out": torch.empty(9, 48)}, "out"),
        ({"out": torch.empty(9, 47)}, "out"),
    ],
)
def test_errors_of_the_other_arguments(arguments, name):
    case = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    if name is None:  # ids beyond the map
        case[4][:] = 5
        if is_on_gpu():
            pytest.skip("ids on a GPU are skipped where they are no experts, not refused")
    with pytest.raises(Error, match=name):
        conclave.fused_experts(*case, **arguments)


def test_fp8_weights_need_scales():
    hidden, w1, w2, weights, ids = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    codes = [w.to(torch.float8_e4m3fn) for w in (w1, w2)]
    config = conclave.fp8_w8a8_moe_quant_config(torch.ones(6), None)
    with pytest.raises(ConclaveValueError, match="w2_scale"):
        conclave.fused_experts(hidden, *codes, weights, ids, quant_config=config)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda w: {"w1": w[0].to_sparse()}, "w1"),
        (lambda w: {"w2": w[1].to("meta")}, "w2"),
        (lambda w: {"quant_config": biased(w[0][:, :79, 0], None)}, "w1_bias"),
        (lambda w: {"quant_config": biased(None, w[1][:, 1:, 0])}, "w2_bias"),
        (lambda w: {"quant_config": biased(w[0][:, :, 0].int(), None)}, "w1_bias"),
    ],
    ids=["sparse", "meta", "w1_bias", "w2_bias", "type"],
)
def test_errors_of_packing_name_the_argument(change, name):
    hidden, w1, w2, weights, ids = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    arguments = {"w1": w1, "w2": w2, **change((w1, w2))}
    with pytest.raises(Error, match=rf"\b{name}\b"):
        conclave.fused_experts(hidden, topk_weights=weights, topk_ids=ids, **arguments)


def test_scales_of_a_wrong_shape_are_named():
    hidden, w1, w2, weights, ids = random_case(2, 9, 128, 128, 6, 2, torch.float32)
    codes = [w.to(torch.float8_e4m3fn) for w in (w1, w2)]
    config = conclave.fp8_w8a8_moe_quant_config(
        torch.ones(6, 2, 2), torch.ones(6, 1, 1), block_shape=[128, 128]
    )
    with pytest.raises(Error, match=r"\bw1_scale\b"):
        conclave.fused_experts(hidden, *codes, weights, ids, quant_config=config)


def biased(w1_bias, w2_bias):
    return conclave.biased_moe_quant_config(w1_bias, w2_bias)


def strided(tensor):
    """The same numbers, columns apart."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def test_rows_that_are_not_dense_are_copied_with_one_warning():
    hidden, w1, w2, weights, ids = case = random_case(3, 40, 16, 32, 4, 2, torch.bfloat16)
    expected = experts_reference(*case)
    w1, w2 = strided(w1), strided(w2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            check(conclave.fused_experts(hidden, w1, w2, weights, ids), expected, torch.bfloat16)
        w1.mul_(0.5)
        out = conclave.fused_experts(hidden, w1, w2, weights, ids)
    check(out, experts_reference(hidden, w1, w2, weights, ids), torch.bfloat16)
    texts = [str(w.message) for w in said if "do not lie densely" in str(w.message)]
    assert [text[:2] for text in texts] == (["w1", "w2"] if is_on_gpu() else [])


@pytest.mark.parametrize(("experts", "top_k"), [(64, 33), (60, 60), (128, 100)])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_any_number_of_choices(experts, top_k, tokens):
    case = random_case(5, tokens, 32, 64, experts, top_k, torch.bfloat16)
    check(conclave.fused_experts(*case), experts_reference(*case), torch.bfloat16)
