"""Layers whose codes have zeros, global scales, orders and factors of columns, against float64."""

from __future__ import annotations

import dataclasses

import numpy
import pytest

import conclave
from conclave.errors import Error
from support.problems import FLOAT32_BAR, expected_output, make_problem, worst_error

GROUP = 32
QUANT = conclave.QuantSpec(
    weights="block",
    block_rows=1,
    block_cols=GROUP,
    zeros="point",
    has_global_scale=True,
    has_column_order=True,
    has_column_factors=True,
)


def coded(random, name, shape, halves):
    """Arrays of matrices [E, rows, cols] by name, and what they mean. Each half of the rows has a
    global scale and an order of its own; factors are one for both."""
    experts, rows, cols = shape
    groups = (experts, rows, -(-cols // GROUP))
    codes = random.integers(-8, 8, shape).astype("int8")
    scale = (random.uniform(0.5, 1.5, groups) / (4 * numpy.sqrt(cols))).astype("float32")
    zero = random.integers(-3, 4, groups).astype("float32")
    factor = random.uniform(0.5, 2, (experts, halves)).astype("float32")
    order = numpy.argsort(random.random((experts, halves, cols)), axis=2).astype("int32") // GROUP
    by_column = random.uniform(0.5, 2, (experts, cols)).astype("float32")
    half = numpy.arange(rows) // (rows // halves)

    def of_elements(plane):
        return numpy.take_along_axis(plane.astype("float64"), order[:, half], axis=2)

    exact = (codes - of_elements(zero)) * of_elements(scale) * factor[:, half, None]
    exact = exact * by_column[:, None]
    arrays = {
        name: codes,
        f"{name}_scale": scale,
        f"{name}_zero": zero,
        f"{name}_global_scale": factor if halves > 1 else factor[:, 0],
        f"{name}_column_order": order if halves > 1 else order[:, 0],
        f"{name}_column_factor": by_column,
    }
    return arrays, exact


@pytest.fixture
def problem():
    return make_problem(numpy.random.default_rng(5), hidden=96, inner=64)


@pytest.fixture
def weights(problem):
    random = numpy.random.default_rng(6)
    gate_up, _ = coded(random, "gate_up", problem.gate_up.shape, 2)
    down, _ = coded(random, "down", problem.down.shape, 1)
    return {**gate_up, **down}


def spec_of(problem, quant=QUANT):
    return conclave.MoeSpec(top_k=problem.top_k, quant=quant)


def test_all_of_it_matches_float64(problem):
    random = numpy.random.default_rng(6)
    gate_up, exact_gate_up = coded(random, "gate_up", problem.gate_up.shape, 2)
    down, exact_down = coded(random, "down", problem.down.shape, 1)
    layer = conclave.Layer.from_tensors(spec_of(problem), **gate_up, **down)
    assert layer.spec.quant == QUANT
    expected = expected_output(
        problem.hidden, exact_gate_up, exact_down, problem.topk_ids, problem.topk_weights
    )
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, expected) <= FLOAT32_BAR


def test_offsets_are_zero_points_times_scales(problem, weights):
    both = {name: weights[name] for name in ("gate_up", "down", "gate_up_scale", "down_scale")}
    points = {name: weights[name] for name in ("gate_up_zero", "down_zero")}
    offsets = {name: zero * weights[name.replace("zero", "scale")] for name, zero in points.items()}
    outputs = []
    for zeros, given in (("point", points), ("offset", offsets)):
        quant = conclave.QuantSpec(weights="block", block_rows=1, block_cols=GROUP, zeros=zeros)
        layer = conclave.Layer.from_tensors(spec_of(problem, quant), **both, **given)
        outputs.append(layer(problem.hidden, **problem.routing))
    numpy.testing.assert_array_equal(*outputs)


def test_layouts_give_the_same_bits(problem, weights):
    mixed = {
        name: numpy.stack(numpy.split(weights[name], 2, axis=1), axis=2).reshape(
            weights[name].shape
        )
        for name in ("gate_up", "gate_up_scale", "gate_up_zero")
    }
    one = {
        "gate_up_global_scale": weights["gate_up_global_scale"][:, 0],
        "gate_up_column_order": weights["gate_up_column_order"][:, 0],
        "gate_up_column_factor": weights["gate_up_column_factor"],
    }
    same = {name: numpy.repeat(array[:, None], 2, axis=1) for name, array in one.items()}
    wide = {
        name: weights[name].astype("int64")
        for name in ("gate_up_column_order", "down_column_order")
    }

    def run(arrays, **arguments):
        layer = conclave.Layer.from_tensors(spec_of(problem), **arrays, **arguments)
        return layer(problem.hidden, **problem.routing)

    expected = run(weights)
    interleaved = run({**weights, **mixed}, gate_up_order="interleaved")
    numpy.testing.assert_array_equal(interleaved, expected)
    numpy.testing.assert_array_equal(run({**weights, **wide}), expected)
    numpy.testing.assert_array_equal(run({**weights, **one}), run({**weights, **same}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("down_zero", numpy.nan),
        ("gate_up_global_scale", numpy.inf),
        ("down_column_order", 2),
        ("gate_up_column_order", -1),
        ("down_column_factor", numpy.inf),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_name(problem, weights, name, value):
    bad = weights[name].copy()
    bad.reshape(-1)[-1] = value
    with pytest.raises(Error, match=name):
        conclave.Layer.from_tensors(spec_of(problem), **{**weights, name: bad})


@pytest.mark.parametrize("name", ["gate_up_zero", "down_global_scale", "down_column_order"])
def test_planes_that_lack_are_refused_by_name(problem, weights, name):
    del weights[name]
    with pytest.raises(Error, match=name.replace("gate_up", "gate")):
        conclave.Layer.from_tensors(spec_of(problem), **weights)


def test_what_is_known_of_a_matrix_changes_no_bit_and_is_checked(problem):
    random = numpy.random.default_rng(7)
    experts, rows, cols = problem.gate_up.shape

    def scales(shape, width):
        numbers = random.uniform(0.5, 1.5, (*shape[:2], shape[2] // width)) / 40
        return numbers.astype("float32").repeat(width // 16, axis=2)

    gate_up = {
        "gate_up": random.integers(0, 16, (experts, rows, cols)).astype("int8"),
        "gate_up_scale": scales((experts, rows, cols), 32),
    }
    gate_up["gate_up_zero"] = 7.5 * gate_up["gate_up_scale"]
    down = {
        "down": random.integers(-32, 32, problem.down.shape).astype("int8"),
        "down_scale": scales(problem.down.shape, 16),
    }
    down["down_zero"] = numpy.zeros_like(down["down_scale"])
    quant = conclave.QuantSpec(weights="block", block_rows=1, block_cols=16, zeros="offset")
    known = dataclasses.replace(
        quant,
        gate_up_codes=conclave.MatrixCodes(dtype="uint4", block_cols=32),
        down_codes=conclave.MatrixCodes(has_zeros=False),
    )
    exact = conclave.LayerOptions(arithmetic="f32_fma")

    def make(quant, **others):
        weights = {**gate_up, **down, **others}
        return conclave.Layer.from_tensors(spec_of(problem, quant), **weights, options=exact)

    layer = make(known)
    assert layer.spec.quant == known
    numpy.testing.assert_array_equal(
        layer(problem.hidden, **problem.routing), make(quant)(problem.hidden, **problem.routing)
    )
    for name, value, match in (
        ("gate_up", 16, "U4"),
        ("down_zero", 1, "no zeros"),
        ("gate_up_scale", 9, "32 neighbouring columns"),
    ):
        bad = {**gate_up, **down}[name].copy()
        bad.reshape(-1)[-1] = value
        with pytest.raises(Error, match=match):
            make(known, **{name: bad})
