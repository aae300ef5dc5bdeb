"""Layers of int8 and int4 weights against float64 on the same codes and scales."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error
from support.problems import FLOAT32_BAR, HALF_BAR, expected_output, make_problem, silu, worst_error

pytestmark = pytest.mark.usefixtures("float32_products")

GROUP32 = conclave.QuantSpec(weights="block", block_rows=1, block_cols=32)


def quantised(weights, largest, group):
    """Integers [E, rows, cols], float32 scales [E, rows, cols / group], and what they mean."""
    experts, rows, _ = weights.shape
    parts = weights.reshape(experts, rows, -1, group)
    scales = (numpy.abs(parts).max(axis=3) / largest).astype("float32")
    codes = numpy.rint(parts / scales[..., None])
    exact = codes * scales[..., None].astype("float64")
    return codes.astype("int8").reshape(weights.shape), scales, exact.reshape(weights.shape)


def in_bytes(codes):
    halves = (codes + 8).astype("uint8")
    return halves[..., ::2] | halves[..., 1::2] << 4


def in_words(codes):
    return numpy.ascontiguousarray(in_bytes(codes)).view("int32")


@pytest.fixture
def problem():
    return make_problem(numpy.random.default_rng(5), hidden=96, inner=64)


def int4_arrays(problem, pack=in_bytes):
    weights, exact = {}, {}
    for name, matrices in problem.weights.items():
        codes, scales, exact[name] = quantised(matrices, 7, 32)
        weights[name], weights[f"{name}_scale"] = pack(codes), scales
    return weights, exact


def int4_spec(problem, **more):
    return conclave.MoeSpec(top_k=problem.top_k, weight_dtype="int4", quant=GROUP32, **more)


def expected_of(problem, exact):
    return expected_output(
        problem.hidden, exact["gate_up"], exact["down"], problem.topk_ids, problem.topk_weights
    )


def int8_rows(rows, group=None):
    """What products see of rows [n, cols], coded in groups of columns."""
    parts = rows.astype("float32").reshape(len(rows), -1, group or rows.shape[1])
    steps = numpy.abs(parts).max(axis=2, keepdims=True) / numpy.float32(127)
    return (numpy.rint(parts / steps).astype("float64") * steps).reshape(rows.shape)


def expected_of_int8_rows(problem, exact, group=None):
    hidden = int8_rows(problem.hidden, group)
    total = numpy.zeros_like(hidden)
    for expert in range(len(exact["down"])):
        tokens, slots = numpy.nonzero(problem.topk_ids == expert)
        gate, up = numpy.split(hidden[tokens] @ exact["gate_up"][expert].T, 2, axis=1)
        rows = int8_rows(silu(gate, up), group) @ exact["down"][expert].T
        numpy.add.at(total, tokens, problem.topk_weights[tokens, slots, None] * rows)
    return total


@pytest.mark.parametrize("rows", ["none", "token"])
def test_int8_matches_float64(problem, rows):
    weights, exact = {}, {}
    for name, matrices in problem.weights.items():
        cols = matrices.shape[2]
        weights[name], scales, exact[name] = quantised(matrices, 127, cols)
        weights[f"{name}_scale"] = scales[..., 0]
    quant = conclave.QuantSpec(weights="channel", activations=rows)
    layer = conclave.Layer.from_tensors(conclave.MoeSpec(top_k=3, quant=quant), **weights)
    assert layer.spec.weight_dtype == "int8"
    out = layer(problem.hidden, **problem.routing)
    if rows == "none":
        assert worst_error(out, expected_of(problem, exact)) <= FLOAT32_BAR
    else:
        assert worst_error(out, expected_of_int8_rows(problem, exact)) <= HALF_BAR


@pytest.mark.parametrize("pack", [in_bytes, in_words])
def test_int4_matches_float64(problem, pack):
    weights, exact = int4_arrays(problem, pack)
    layer = conclave.Layer.from_tensors(int4_spec(problem), **weights)
    assert layer.spec.weight_dtype == "int4"
    assert (layer.spec.hidden_size, layer.spec.intermediate_size) == (96, 64)
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, expected_of(problem, exact)) <= FLOAT32_BAR


def test_int8_rows_on_request_match_float64(problem):
    weights, exact = int4_arrays(problem)
    spec = int4_spec(problem).with_int8_rows()
    layer = conclave.Layer.from_tensors(spec, **weights)
    assert layer.spec.quant.activation_dtype == "int8"
    assert layer.spec.quant.activation_group == 32
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, expected_of_int8_rows(problem, exact, 32)) <= HALF_BAR
    assert worst_error(out, expected_of(problem, exact)) > HALF_BAR, "rows are coded"
    with pytest.raises(ConclaveValueError, match="already"):
        spec.with_int8_rows()
    float8 = conclave.MoeSpec(
        top_k=3, weight_dtype="float8_e4m3fn", quant=conclave.QuantSpec(weights="channel")
    )
    with pytest.raises(Error, match="activation_dtype"):
        conclave.Layer.from_tensors(float8.with_int8_rows(), **weights)


def test_int4_layouts_give_the_same_bits(problem, torch):
    weights, _ = int4_arrays(problem)
    words, _ = int4_arrays(problem, in_words)
    gate, up = numpy.split(weights["gate_up"], 2, axis=1)
    mixed = {
        name: numpy.stack(numpy.split(weights[name], 2, axis=1), axis=2).reshape(
            weights[name].shape
        )
        for name in ("gate_up", "gate_up_scale")
    }
    apart = {name: weights[name] for name in ("gate_up_scale", "down", "down_scale")}
    strided = numpy.repeat(weights["down"], 2, axis=1)[:, ::2]
    variants = [
        (words, {}),
        ({name: torch.tensor(array) for name, array in weights.items()}, {}),
        ({**apart, "gate": gate, "up": up}, {}),
        ({**weights, "gate_up": list(weights["gate_up"]), "down": list(words["down"])}, {}),
        ({**weights, "down": strided}, {}),
        ({**weights, **mixed}, {"gate_up_order": "interleaved"}),
    ]
    spec = int4_spec(problem)
    expected = conclave.Layer.from_tensors(spec, **weights)(problem.hidden, **problem.routing)
    for arrays, arguments in variants:
        layer = conclave.Layer.from_tensors(spec, **arrays, **arguments)
        numpy.testing.assert_array_equal(layer(problem.hidden, **problem.routing), expected)


def test_int4_slices_add_up(problem):
    weights, exact = int4_arrays(problem)
    total = numpy.zeros_like(problem.hidden)
    for rank in range(2):
        part = conclave.ParallelSpec(tp_size=2, tp_rank=rank, reduce="partial")
        layer = conclave.Layer.from_tensors(int4_spec(problem), **weights, parallel=part)
        total += layer(problem.hidden, **problem.routing)
    assert worst_error(total, expected_of(problem, exact)) <= FLOAT32_BAR


def test_int4_reload(problem):
    weights, exact = int4_arrays(problem)
    layer = conclave.Layer.from_tensors(int4_spec(problem), **weights)
    other = {**weights, "down_scale": 2 * weights["down_scale"]}
    layer.reload(**other)
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, 2 * expected_of(problem, exact)) <= FLOAT32_BAR


def test_int4_refusals_name_the_array(problem):
    weights, _ = int4_arrays(problem)

    def refusal(kind, arguments=None, **arrays):
        with pytest.raises(kind) as error:
            conclave.Layer.from_tensors(
                int4_spec(problem), **{**weights, **arrays}, **(arguments or {})
            )
        return str(error.value)

    apart = numpy.repeat(weights["down"], 2, axis=2)[:, :, ::2]
    assert "down" in refusal(Error, down=apart)
    assert "rows only" in refusal(ConclaveUnsupportedError, {"transposed": True})
    assert "gate_up" in refusal(Error, gate_up=problem.gate_up)
    assert "gate_up" in refusal(Error, gate_up=weights["gate_up"][:, :, :-1])
    bad = weights["down_scale"].copy()
    bad[1, 2, 1] = numpy.nan
    assert "down_scale" in refusal(Error, down_scale=bad)
    bad[1, 2, 1] = -1
    assert "down_scale" in refusal(Error, down_scale=bad)
    assert "down_scale" in refusal(Error, down_scale=None)


def test_an_array_of_bytes_does_not_say_that_it_is_int4(problem):
    weights, _ = int4_arrays(problem)
    with pytest.raises(Error):
        conclave.Layer.from_tensors(conclave.MoeSpec(top_k=3, quant=GROUP32), **weights)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_fused_experts_refuses_integers(problem, kind):
    codes = {name: array.astype(kind) for name, array in problem.weights.items()}
    with pytest.raises(Error):
        conclave.fused_experts(
            problem.hidden,
            codes["gate_up"],
            codes["down"],
            problem.topk_weights,
            problem.topk_ids,
        )


def test_weight_forms_are_listed():
    forms = {form.name: form for form in conclave.weight_forms()}
    assert forms["int4-group32"].quant == GROUP32
    assert forms["int4-group32"].dtype == "int4"
    assert forms["int4-group32"].packed_in == "int32"
    assert forms["int8-token"].quant.activations == "token"
    assert forms["bf16"].quant == conclave.QuantSpec()
