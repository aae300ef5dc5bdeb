"""Layers of 4-bit codes that stand for values of a table, against float64 on what they mean."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave import _conclave
from support.problems import FLOAT32_BAR, expected_output, make_problem, worst_error

pytestmark = pytest.mark.usefixtures("float32_products")

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
BNB_FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
TABLES = {
    "float4_e2m1fn_x2": E2M1 + [-value for value in E2M1],
    "nf4": [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022833334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    "iq4": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "bnb_fp4": BNB_FP4 + [-value for value in BNB_FP4],
}
GROUP32 = conclave.QuantSpec(weights="block", block_rows=1, block_cols=32)


def quantised(weights, table):
    """Two codes a byte, the first in the lower half; scales of 32 columns; what they mean."""
    experts, rows, _ = weights.shape
    values = numpy.array(table, "float32")
    parts = weights.reshape(experts, rows, -1, 32)
    scales = (numpy.abs(parts).max(axis=3) / values.max()).astype("float32")
    distances = numpy.abs((parts / scales[..., None])[..., None] - values)
    codes = distances.argmin(axis=4).astype("uint8")
    exact = values[codes].astype("float64") * scales[..., None]
    codes = codes.reshape(weights.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, exact.reshape(weights.shape)


@pytest.mark.parametrize("name", TABLES)
def test_codes_match_float64(name):
    problem = make_problem(numpy.random.default_rng(6), hidden=96, inner=64)
    weights, exact = {}, {}
    for matrix, values in problem.weights.items():
        codes, scales, exact[matrix] = quantised(values, TABLES[name])
        weights[matrix], weights[f"{matrix}_scale"] = codes, scales
    spec = conclave.MoeSpec(top_k=problem.top_k, weight_dtype=name, quant=GROUP32)
    layer = conclave.Layer.from_tensors(spec, **weights)
    assert layer.spec.weight_dtype == name
    assert (layer.spec.hidden_size, layer.spec.intermediate_size) == (96, 64)
    expected = expected_output(
        problem.hidden, exact["gate_up"], exact["down"], problem.topk_ids, problem.topk_weights
    )
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, expected) <= FLOAT32_BAR


def test_forms_of_four_bits_are_listed():
    forms = {form.name: form for form in conclave.weight_forms()}
    assert forms["mxfp4"].dtype == "float4_e2m1fn_x2"
    assert (forms["mxfp4"].packed_in, forms["mxfp4"].scale_dtype) == ("uint8", "float8_e8m0fnu")
    assert (forms["nvfp4"].packed_in, forms["nvfp4"].scale_dtype) == ("uint8", "float8_e4m3fn")
    assert forms["nvfp4"].quant.has_global_scale
    assert (forms["nf4"].method, forms["nf4"].packed_in) == ("", None)


def test_bits_of_types_are_those_of_their_names():
    names = {"int4": 4, "I4": 4, "uint4": 4, "nf4": 4, "BNB_FP4": 4, "iq4": 4, "F4": 4, "I6": 6}
    names |= {"float8_e4m3fn": 8, "int8": 8, "bfloat16": 16, "F32": 32, "None": 0, "": 0, "f4": 0}
    assert {name: _conclave.element_bits(name) for name in names} == names
