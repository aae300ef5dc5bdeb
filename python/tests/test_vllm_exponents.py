"""Scales of e4m3 that are powers of two: of weights as bytes of e8m0, of rows by `scale_fmt`."""

from __future__ import annotations

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
from support.devices import seeded  # noqa: E402
from support.problems import HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import FP8_MAX, experts_reference, random_case  # noqa: E402

needs_e8m0 = pytest.mark.skipif(
    not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu"
)
KINDS = ["uint8", pytest.param("float8_e8m0fnu", marks=needs_e8m0), "float32"]
EXPERTS, HIDDEN, INNER = 4, 256, 128
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def rows_by_powers(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rows through e4m3, whose scale is the next power of two of amax / 448."""
    values = rows.float().unflatten(1, (-1, group))
    amax = values.abs().amax(2, keepdim=True)
    steps = torch.exp2(torch.ceil(torch.log2(amax.double() / FP8_MAX)))
    steps = torch.where(amax == 0, 1.0, steps)
    codes = (values / steps.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.double() * steps).flatten(1)


def coded(weights: torch.Tensor, shares: str):
    """Codes, exponents as bytes, and float64 weights."""
    if shares == "block":
        parts = weights.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        amax = parts.abs().amax((2, 4))
        spread = lambda t: t.repeat_interleave(128, 1).repeat_interleave(128, 2)  # noqa: E731
    elif shares == "channel":
        amax = weights.abs().amax(2, keepdim=True)
        spread = lambda t: t  # noqa: E731
    else:
        amax = weights.abs().amax((1, 2))
        spread = lambda t: t[:, None, None]  # noqa: E731
    exponents = torch.ceil(torch.log2(amax / FP8_MAX))
    scales = spread(torch.exp2(exponents))
    codes = (weights / scales).to(torch.float8_e4m3fn)
    return codes, (exponents + 127).to(torch.uint8), codes.double() * scales.double()


def as_kind(exponents: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "float32":
        return torch.exp2(exponents.float() - 127)
    return exponents.view(getattr(torch, kind))


def case(shares: str = "block"):
    hidden, w1, w2, weights, ids = random_case(9, 7, INNER, HIDDEN, EXPERTS, 2, torch.float32)
    hidden[3] = 0
    return hidden, coded(w1, shares), coded(w2, shares), weights, ids


def layer_of(weights, ids, config, **arguments):
    names = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN}
    return vllm.FusedMoE(
        **names,
        intermediate_size=INNER,
        params_dtype=torch.float32,
        quant_config=config,
        custom_routing_function=lambda **_: (weights, ids),
        **arguments,
    )


def fill(layer, w1, w2, suffix: str, kind: str) -> None:
    for expert in range(EXPERTS):
        for name, planes in (("w1", w1), ("w3", w1), ("w2", w2)):
            param = "w2" if name == "w2" else "w13"
            codes, exponents = planes[0][expert], as_kind(planes[1], kind)[expert]
            if name != "w2":
                half = 0 if name == "w1" else 1
                codes = codes.chunk(2)[half]
                exponents = exponents.chunk(2)[half] if exponents.ndim else exponents
            for key, tensor in (("weight", codes), (suffix, exponents)):
                full = f"{param}_{key}"
                layer.weight_loader(getattr(layer, full), tensor, full, name, expert)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_blocks_load_exponents_and_rows_follow_scale_fmt(kind, scale_fmt):
    hidden, w1, w2, weights, ids = case()
    layer = layer_of(weights, ids, {**BLOCK, "scale_fmt": scale_fmt})
    fill(layer, w1, w2, "weight_scale_inv", kind)
    assert torch.equal(layer.w13_weight_scale_inv, as_kind(w1[1], "float32"))
    assert layer.moe_quant_config.scale_fmt == scale_fmt
    out = layer(hidden, torch.zeros(7, EXPERTS))
    by_powers = experts_reference(
        hidden, w1[2], w2[2], weights, ids, quantise=lambda rows: rows_by_powers(rows, 128)
    )
    assert (worst_error(out, by_powers) <= HALF_BAR) == (scale_fmt == "ue8m0")


@pytest.mark.parametrize("kind", KINDS)
def test_one_scale_for_a_matrix_is_loaded_as_an_exponent(kind):
    hidden, w1, w2, weights, ids = case("tensor")
    layer = layer_of(weights, ids, {"quant_method": "fp8", "scale_fmt": "ue8m0"})
    fill(layer, w1, w2, "weight_scale", kind)
    expected = experts_reference(
        hidden,
        w1[2],
        w2[2],
        weights,
        ids,
        quantise=lambda rows: rows_by_powers(rows, rows.shape[1]),
    )
    assert worst_error(layer(hidden, torch.zeros(7, EXPERTS)), expected) <= HALF_BAR


def test_tensor_parallel_ranks_cut_exponents():
    hidden, w1, w2, weights, ids = random_case(9, 7, 256, HIDDEN, EXPERTS, 2, torch.float32)
    first, second = coded(w1, "block"), coded(w2, "block")
    total = 0
    for rank in range(2):
        names = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN}
        layer = vllm.FusedMoE(
            **names,
            intermediate_size=256,
            params_dtype=torch.float32,
            quant_config={**BLOCK, "scale_fmt": "ue8m0"},
            custom_routing_function=lambda **_: (weights, ids),
            moe_parallel_config=vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=rank),
        )
        fill(layer, first, second, "weight_scale_inv", "uint8")
        total = total + layer(hidden, torch.zeros(7, EXPERTS)).double()
    expected = experts_reference(
        hidden, first[2], second[2], weights, ids, quantise=lambda rows: rows_by_powers(rows, 128)
    )
    assert worst_error(total, expected) <= HALF_BAR


# Configurations of calls.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", ["block", "channel", "tensor"])
def test_a_call_takes_exponents_and_scale_fmt(shares, kind):
    hidden, w1, w2, weights, ids = case(shares)
    rule = {"block_shape": [128, 128]} if shares == "block" else {}
    if shares == "channel":
        rule = {"per_out_ch_quant": True, "per_act_token_quant": True}
    scales = (as_kind(w1[1], kind), as_kind(w2[1], kind))
    config = vllm.fp8_w8a8_moe_quant_config(*scales, **rule, scale_fmt="ue8m0")
    out = conclave.fused_experts(hidden, w1[0], w2[0], weights, ids, quant_config=config)
    expected = experts_reference(
        hidden,
        w1[2],
        w2[2],
        weights,
        ids,
        quantise=lambda rows: rows_by_powers(rows, 128 if shares == "block" else rows.shape[1]),
    )
    assert worst_error(out, expected) <= HALF_BAR
    plain = vllm.fp8_w8a16_moe_quant_config(
        *scales, rule.get("block_shape"), per_out_ch_quant=shares == "channel"
    )
    out = conclave.fused_experts(hidden, w1[0], w2[0], weights, ids, quant_config=plain)
    assert worst_error(out, experts_reference(hidden, w1[2], w2[2], weights, ids)) <= HALF_BAR


def test_float_is_the_usual_rule():
    hidden, w1, w2, weights, ids = case()
    scales = (as_kind(w1[1], "float32"), as_kind(w2[1], "float32"))
    found = [
        conclave.fused_experts(
            hidden,
            w1[0],
            w2[0],
            weights,
            ids,
            quant_config=vllm.fp8_w8a8_moe_quant_config(
                *scales, block_shape=[128, 128], scale_fmt=fmt
            ),
        )
        for fmt in (None, "float", "ue8m0")
    ]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# The ends of the range, and what is refused.


def test_exponents_mean_powers_down_to_the_smallest():
    layer = layer_of(None, None, BLOCK)
    for stored, value in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)):
        exponents = torch.full((1, 2), stored, dtype=torch.uint8)
        layer.weight_loader(layer.w13_weight_scale_inv, exponents, "w13_weight_scale_inv", "w1", 2)
        assert layer.w13_weight_scale_inv[2, 0].tolist() == [value, value]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_is_no_number_is_refused(kind):
    layer = layer_of(None, None, BLOCK)
    exponents = torch.full((2, 1), 255, dtype=torch.uint8).view(getattr(torch, kind))
    with pytest.raises(ConclaveValueError, match=r"w2_weight_scale_inv: w2 .* 0 to 254, .* 255"):
        layer.weight_loader(layer.w2_weight_scale_inv, exponents, "w2_weight_scale_inv", "w2", 0)
    assert not layer.w2_weight_scale_inv.any()
    _, w1, w2, weights, ids = case()
    first = as_kind(w1[1], kind).clone()
    first.view(torch.uint8)[2, 1, 0] = 255
    config = vllm.fp8_w8a8_moe_quant_config(first, as_kind(w2[1], kind), block_shape=[128, 128])
    with pytest.raises(Error, match="w1_scale, expert 2: a scale has no meaning"):
        conclave.fused_experts(
            torch.ones(7, HIDDEN), w1[0], w2[0], weights, ids, quant_config=config
        )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_other_integers_are_no_scales(dtype):
    layer = layer_of(None, None, BLOCK)
    with pytest.raises(ConclaveTypeError, match=r"expected torch.float32, found torch.int"):
        layer.weight_loader(
            layer.w13_weight_scale_inv,
            torch.ones(1, 2, dtype=dtype),
            "w13_weight_scale_inv",
            "w1",
            0,
        )


def test_codes_are_no_values():
    """What a configuration leaves out may be quantised all the same in a file."""
    layer = layer_of(None, None, None)
    with pytest.raises(ConclaveTypeError, match=r"expected torch.float32, found torch.int8"):
        codes = torch.ones(INNER, HIDDEN, dtype=torch.int8)
        layer.weight_loader(layer.w13_weight, codes, "w13_weight", "w1", 0)


@pytest.mark.parametrize("scale_fmt", ["e8m0", "UE8M0", 8])
def test_other_formats_of_scales_are_refused(scale_fmt):
    with pytest.raises(ConclaveValueError, match=r"scale_fmt: expected None, 'float' or 'ue8m0'"):
        vllm.fp8_w8a8_moe_quant_config(None, None, scale_fmt=scale_fmt)
    with pytest.raises(Error, match=str(scale_fmt)):
        layer_of(None, None, {**BLOCK, "scale_fmt": scale_fmt})


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"quant_dtype": "int8"}, "rows of int8"),
        ({"quant_dtype": "mxfp4"}, "rows of mxfp4"),
        ({"weight_dtype": "float8_e4m3fn"}, "rows of None"),
        (
            {"quant_dtype": "float8_e4m3fn", "a1_scale": torch.ones(1), "a2_scale": torch.ones(1)},
            "static ones",
        ),
    ],
)
def test_rows_of_other_kinds_have_no_such_scales(arguments, found):
    config = vllm.FusedMoEQuantConfig.make(**arguments, scale_fmt="ue8m0")
    assert f"found {found}" in config.unsupported_reason
    with pytest.raises(ConclaveUnsupportedError, match="scale_fmt: ue8m0"):
        layer_of(None, None, config)


def test_all_rows_of_a_batch_are_by_themselves():
    _, w1, w2, weights, ids = case()
    layer = layer_of(weights, ids, {**BLOCK, "scale_fmt": "ue8m0"})
    fill(layer, w1, w2, "weight_scale_inv", "uint8")
    many = torch.randn(7, HIDDEN, generator=seeded(2))
    whole = layer(many, torch.zeros(7, EXPERTS))
    many[1:] *= 100
    assert torch.equal(layer(many, torch.zeros(7, EXPERTS))[0], whole[0])
