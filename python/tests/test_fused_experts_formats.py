"""`fused_experts` on every format that a builder of configurations names, against float64 of the
same codes and scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

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
from conclave.vllm._arithmetic import _on_device  # noqa: E402
from conclave.vllm._formats import ROWS_IN_GROUPS  # noqa: E402
from support.coded import Coded, Coder, rows_in_groups  # noqa: E402
from support.formats import (  # noqa: E402
    CODED_ROWS,
    EXPERTS,
    FORMATS,
    NVFP4_STEPS,
    SIZES,
    TOKENS,
    TOP_K,
    Case,
    build_config,
    make_case,
)
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_matches_float64(name, size):
    case = make_case(name, *size)
    assert worst_error(case.run(), case.expected()) <= FLOAT32_BAR
    one = conclave.fused_experts(
        case.hidden[3:4],
        case.w1.codes,
        case.w2.codes,
        case.topk_weights[3:4],
        case.topk_ids[3:4],
        quant_config=case.config,
    )
    assert torch.equal(one[0], case.run()[3])


@pytest.mark.parametrize("name", [*FORMATS, *CODED_ROWS])
def test_a_format_follows_its_arrays(name):
    """Layers are packed once, and again when one of the arrays was written to."""
    case = make_case(name, 96, 64)
    case.run()
    layers = conclave.vllm.packed_layers()
    case.run()
    assert conclave.vllm.packed_layers() == layers
    other = make_case(name, 96, 64)
    first = other.w1.codes.view(torch.uint8)[:, ::3].clone()
    case.w1.codes.view(torch.uint8)[:, ::3] = first.flip(0)
    other.w1.codes.view(torch.uint8)[:, ::3] = first.flip(0)
    assert torch.equal(case.run(), other.run())
    scale = case.w2.scale
    scale.copy_(scale + 1 if scale.dtype == torch.uint8 else scale.float() * 2)
    again = case.run()
    conclave.vllm.forget_packed_layers()
    assert torch.equal(again, case.run()) and not torch.equal(again, other.run())


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_of_a_format_add_up(name):
    case = make_case(name, 96, 64)
    total = torch.zeros_like(case.hidden)
    for rank in range(2):
        local, expert_map, _ = conclave.determine_expert_map(2, rank, EXPERTS)
        held = torch.as_tensor(expert_map) >= 0
        w1, w2 = (
            dataclasses.replace(
                w,
                codes=w.codes[held],
                scale=w.scale[held],
                zero=None if w.zero is None else w.zero[held],
                alphas=None if w.alphas is None else w.alphas[held],
            )
            for w in (case.w1, case.w2)
        )
        config = FORMATS[name][1](w1, w2)
        assert w1.codes.shape[0] == local
        total += conclave.fused_experts(
            case.hidden,
            w1.codes,
            w2.codes,
            case.topk_weights,
            case.topk_ids,
            quant_config=config,
            expert_map=expert_map,
            global_num_experts=EXPERTS,
        )
    assert worst_error(total, case.expected()) <= FLOAT32_BAR


@pytest.mark.parametrize("name", [n for n in (*FORMATS, *CODED_ROWS) if "nvfp4" not in n])
def test_arrays_of_numpy_give_the_same_bits(name):
    case = make_case(name, 96, 64)
    if case.w1.codes.dtype == torch.float8_e4m3fn:
        pytest.skip("numpy has no such type")
    w1, w2 = (
        Coded(*(None if value is None else value.numpy() for value in vars(w).values()))
        for w in (case.w1, case.w2)
    )
    out = conclave.fused_experts(
        case.hidden.numpy(),
        w1.codes,
        w2.codes,
        case.topk_weights.numpy(),
        case.topk_ids.numpy(),
        quant_config=build_config(name, w1, w2),
    )
    numpy.testing.assert_array_equal(out, case.run().numpy())


def swiglu_oai(rows: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate = rows[..., ::2].clamp(max=limit)
    up = rows[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@pytest.mark.parametrize("name", ["mxfp4_w4a16", "w_mxfp6_e3m2", "int4_w4a16-zeros"])
def test_interleaved_rows_with_biases(name):
    """As gpt-oss has them."""
    hidden, inner = 96, 64
    case = make_case(name, hidden, inner)
    coder = Coder(9)
    bias1, bias2 = coder.uniform(EXPERTS, 2 * inner) - 1, coder.uniform(EXPERTS, hidden) - 1
    config = case.config
    config._w1.bias, config._w2.bias = bias1, bias2
    config.gemm1_alpha, config.gemm1_clamp_limit = 1.5, 5.0
    out = case.run(activation="swigluoai", quant_config=config)
    expected = torch.zeros(TOKENS, hidden, dtype=torch.float64)
    for token in range(TOKENS):
        for expert, share in zip(case.topk_ids[token], case.topk_weights[token], strict=True):
            product = case.w1.exact[expert] @ case.hidden[token].double() + bias1[expert].double()
            inside = swiglu_oai(product, 1.5, 5.0)
            rows = case.w2.exact[expert] @ inside + bias2[expert].double()
            expected[token] += share.double() * rows
    assert worst_error(out, expected) <= FLOAT32_BAR


def coded_rows(rows: torch.Tensor, largest: float, scale: float | None) -> torch.Tensor:
    """What products see of rows that become codes, of int8 or e4m3, float64."""
    rows = rows.float()
    step = rows.abs().amax(1, keepdim=True) / largest if scale is None else torch.tensor(scale)
    codes = rows / step
    if largest == 127:
        codes = codes.round().clamp(-128, 127)
    else:
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * step.double()


def expected_of_coded_rows(case: Case, code: Callable[[torch.Tensor, int], Any]) -> torch.Tensor:
    """code(rows, operand): what the product of w1, 0, or w2, 1, sees of rows."""
    seen = code(case.hidden, 0)
    total = torch.zeros_like(seen)
    for expert in range(EXPERTS):
        tokens, slots = torch.nonzero(case.topk_ids == expert, as_tuple=True)
        gate, up = (seen[tokens] @ case.w1.exact[expert].T).chunk(2, 1)
        inside = code(torch.nn.functional.silu(gate) * up, 1)
        shares = case.topk_weights[tokens, slots].double()[:, None]
        total.index_add_(0, tokens, shares * (inside @ case.w2.exact[expert].T))
    return total


ROWS = {
    "int8-token": ("int8", {"per_act_token_quant": True}, (None, None)),
    "int8-dynamic": ("int8", {}, (None, None)),
    "int8-static": (
        "int8",
        {"a1_scale": torch.tensor(0.03), "a2_scale": torch.full((EXPERTS,), 0.02)},
        (0.03, 0.02),
    ),
    "mxfp4-fp8": ("mxfp4", {}, (None, None)),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_codes_match_float64(name):
    """An activated value near the border of two codes may take either: all rows as one vector stay
    within the bar, and so does each row but for a few."""
    kind, arguments, scales = ROWS[name]
    coder = Coder(17)
    make = coder.signed if kind == "int8" else coder.mxfp4
    w1, w2 = make((EXPERTS, 128, 96)), make((EXPERTS, 96, 64))
    build = vllm.int8_w8a8_moe_quant_config
    if kind == "mxfp4":
        build = vllm.mxfp4_w4a8_moe_quant_config
    config = build(w1.scale, w2.scale, **arguments)
    assert not config.rows_stay_plain
    base = make_case("int8_w8a16-channel", 96, 64)
    case = dataclasses.replace(base, w1=w1, w2=w2, config=config)
    largest = 127 if kind == "int8" else 448
    expected = expected_of_coded_rows(
        case, lambda rows, operand: coded_rows(rows, largest, scales[operand])
    )
    out = case.run()
    assert float((out - expected).norm() / expected.norm()) <= HALF_BAR
    errors = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert int((errors <= HALF_BAR).sum()) >= TOKENS - 2
    plain = worst_error(out, case.expected())
    assert plain > HALF_BAR or math.isclose(plain, HALF_BAR), "rows were not quantised"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CODED_ROWS)
def test_rows_in_groups_match_float64(name, size):
    """Here too a value near the border of two codes may take either, in a token or two."""
    case = make_case(name, *size)
    assert not case.config.rows_stay_plain
    kind = CODED_ROWS[name][0]
    expected = expected_of_coded_rows(
        case, lambda rows, operand: rows_in_groups(rows, kind, NVFP4_STEPS[operand])
    )
    errors = (case.run() - expected).norm(dim=1) / expected.norm(dim=1)
    assert int((errors <= HALF_BAR).sum()) >= TOKENS - 2
    plain = torch.as_tensor(case.expected())
    apart = (case.run() - plain).norm(dim=1) / plain.norm(dim=1)
    assert float(apart.min()) > HALF_BAR, "rows were not quantised"


@pytest.mark.parametrize("name", ["int4_w4afp8", "int4_w4afp8-by-row"])
def test_a_layer_quantises_rows_beside_int4(name):
    case = make_case(name, 96, 64)
    layer = vllm.FusedMoE(EXPERTS, TOP_K, 96, 64, quant_config=case.config)
    layer.w13_weight.data.copy_(case.w1.codes)
    layer.w2_weight.data.copy_(case.w2.codes)
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator("cpu").manual_seed(5))
    shares, ids = vllm.fused_topk(case.hidden, logits, TOP_K, True)[:2]
    routed = dataclasses.replace(case, topk_weights=shares, topk_ids=ids)
    out = layer(case.hidden, logits)
    assert torch.equal(out, routed.run())
    assert worst_error(out, routed.expected()) > HALF_BAR, "rows were not quantised"


def test_scales_of_rows_beside_int4_are_read_as_given():
    """By row, by group, static: what the descriptors of rows say, and never int8."""
    case = make_case("int4_w4afp8-by-row", 96, 64)
    given = case.config
    static = dataclasses.replace(
        given,
        _a1=vllm.FusedMoEQuantDesc(given.quant_dtype, None, torch.tensor(0.01)),
        _a2=vllm.FusedMoEQuantDesc(given.quant_dtype, None, torch.tensor(0.02)),
    )
    expected = expected_of_coded_rows(
        case, lambda rows, operand: coded_rows(rows, 448, (0.01, 0.02)[operand])
    )
    out = dataclasses.replace(case, config=static).run()
    assert float((out - expected).norm() / expected.norm()) <= HALF_BAR
    assert not torch.equal(out, case.run())
    with pytest.raises(ConclaveUnsupportedError, match="zero points"):
        zeros = torch.zeros_like(case.w1.scale), torch.zeros_like(case.w2.scale)
        dataclasses.replace(
            case,
            config=dataclasses.replace(
                given,
                _w1=dataclasses.replace(given._w1, zp=zeros[0]),
                _w2=dataclasses.replace(given._w2, zp=zeros[1]),
            ),
        ).run()


@pytest.mark.parametrize("rows", ROWS_IN_GROUPS)
def test_rows_in_groups_are_quantised_on_every_device(rows):
    fields = {"activations": "group", "activation_group": 32, **ROWS_IN_GROUPS[rows]}
    quant = conclave.QuantSpec(weights="block", block_rows=1, block_cols=32, **fields)
    for device in ("cpu", "cuda:0"):
        assert _on_device(quant, "float4_e2m1fn_x2", device) == quant


def test_rows_that_a_gpu_does_not_make_stay_as_they_are_there():
    quant = conclave.QuantSpec(weights="channel", activations="group", activation_group=32)
    assert _on_device(quant, "int8", "cpu") == quant
    plain = _on_device(quant, "int8", "cuda:0")
    assert (plain.weights, plain.activations) == ("channel", "none")


def test_rows_of_nvfp4_need_both_steps():
    case = make_case("nvfp4", 96, 64)
    case.config._a2.alpha_or_gscale = None
    with pytest.raises(ConclaveValueError, match="a1_gscale, a2_gscale"):
        case.run()


def test_refusals_name_the_argument():
    def refusal(kind: type[Exception], name: str, **changed: Any) -> str:
        case = make_case(name, 96, 64)
        for field, value in changed.items():
            operand, _, what = field.partition("_")
            setattr(getattr(case, operand), what, value(getattr(getattr(case, operand), what)))
        with pytest.raises(kind) as caught:
            dataclasses.replace(case, config=FORMATS[name][1](case.w1, case.w2)).run()
        return str(caught.value)

    group = "int4_w4a16-group"
    assert "w1: expected one of uint8" in refusal(
        ConclaveTypeError, group, w1_codes=torch.Tensor.float
    )
    assert "w2: expected one of uint8" in refusal(
        ConclaveTypeError, group, w2_codes=torch.Tensor.int
    )
    assert "w1: expected 128 rows" in refusal(
        ConclaveValueError, group, w1_codes=lambda c: c[:, :-2]
    )
    assert "w1_scale" in refusal(Error, group, w1_scale=lambda s: s[:, :, :-1])
    assert "w2_scale" in refusal(ConclaveTypeError, group, w2_scale=lambda s: s.int())
    assert "w2_zp" in refusal(ConclaveTypeError, "int4_w4a16-zeros", w2_zero=lambda z: z.int())
    assert "w1_zp" in refusal(Error, "int4_w4a16-zeros", w1_zero=lambda z: z[:, :-1])
    assert "w1_scale" in refusal(ConclaveTypeError, "mxfp4_w4a16", w1_scale=lambda s: s.float())
    assert "w1_scale" in refusal(Error, "w_mxfp6_e3m2", w1_scale=lambda s: s[:, :-1])
    assert "w1: expected rows of whole codes" in refusal(
        ConclaveValueError, "w_mxfp6_e3m2", w1_codes=lambda c: c[:, :, :-1]
    )
    nv = "nvfp4_w4a16"
    assert "w2_scale" in refusal(ConclaveTypeError, nv, w2_scale=lambda s: s.view(torch.uint8))
    assert "g1_alphas, g2_alphas" in refusal(ConclaveValueError, nv, w1_alphas=lambda a: None)
    assert "g1_alphas" in refusal(Error, nv, w1_alphas=lambda a: a[:-1])
    assert "w1_scale: weights of int4 need scales" in refusal(
        ConclaveValueError, group, w1_scale=lambda s: None
    )


@pytest.mark.parametrize("name", [*FORMATS, *CODED_ROWS])
def test_a_layer_of_a_configuration_runs_it(name):
    """`FusedMoE` has parameters for the codes; scales are those of the configuration."""
    case = make_case(name, 96, 64)
    layer = vllm.FusedMoE(
        EXPERTS,
        TOP_K,
        96,
        64,
        params_dtype=torch.float32,
        quant_config=case.config,
        custom_routing_function=lambda **_: (case.topk_weights, case.topk_ids),
    )
    if name == "gptq_marlin-8-channel":  # nothing says that these bytes are unsigned
        with pytest.raises(ConclaveTypeError, match=r"expected torch\.int8"):
            layer.weight_loader(layer.w2_weight, case.w2.codes[0], "w2_weight", "w2", 0)
        layer.w13_weight = torch.nn.Parameter(case.w1.codes, requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(case.w2.codes, requires_grad=False)
    else:
        for expert in range(EXPERTS):
            for shard, part in zip(("w1", "w3"), case.w1.codes[expert].chunk(2), strict=True):
                layer.weight_loader(layer.w13_weight, part, "w13_weight", shard, expert)
            layer.weight_loader(layer.w2_weight, case.w2.codes[expert], "w2_weight", "w2", expert)
    out = layer(case.hidden, torch.zeros(TOKENS, EXPERTS))
    assert torch.equal(out, case.run())
