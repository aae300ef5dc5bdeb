"""Hypothesis: any shape, stride, type and id is either computed right or refused by name."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave import _conclave
from support.problems import FLOAT32_BAR, HALF_BAR, expected_output, make_problem, worst_error

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = pytest.importorskip("hypothesis.strategies")

settings = hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
SIZES = st.fixed_dictionaries(
    {
        "experts": st.integers(1, 12),
        "hidden": st.integers(1, 70),
        "inner": st.integers(1, 40),
        "tokens": st.integers(0, 20),
    }
)


@st.composite
def strided(draw, array):
    """The same values with other strides, maybe such as cannot be taken."""
    rows, cols = array.shape
    step = draw(st.integers(1, 3))
    left, right = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    base = numpy.zeros((rows * step, left + cols + right), array.dtype)
    view = base[::step, left : left + cols]
    view[:] = array
    return view


@settings
@hypothesis.given(st.data(), SIZES, st.integers(0, 2**31))
def test_shapes_and_strides(data, sizes, seed):
    top_k = data.draw(st.integers(1, sizes["experts"]))
    problem = make_problem(numpy.random.default_rng(seed), top_k=top_k, **sizes)
    layer = problem.layer()
    out = layer(
        data.draw(strided(problem.hidden)),
        topk_ids=data.draw(strided(problem.topk_ids)),
        topk_weights=data.draw(strided(problem.topk_weights)),
    )
    assert worst_error(out, problem.expected()) <= FLOAT32_BAR


@settings
@hypothesis.given(
    st.sampled_from(["float32", "float16"]),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from(["int32", "int64"]),
    st.sampled_from(["float32", "float16"]),
    st.integers(0, 2**31),
)
def test_types(weights, rows, ids, routing, seed):
    problem = make_problem(numpy.random.default_rng(seed))
    gate_up, down = problem.gate_up.astype(weights), problem.down.astype(weights)
    hidden = problem.hidden.astype(rows)
    topk_weights = problem.topk_weights.astype(routing)
    layer = conclave.Layer.from_tensors(problem.spec, gate_up=gate_up, down=down)
    out = layer(hidden, topk_ids=problem.topk_ids.astype(ids), topk_weights=topk_weights)
    expected = expected_output(hidden, gate_up, down, problem.topk_ids, topk_weights)
    exact = weights == rows == "float32"
    assert worst_error(out, expected) <= (FLOAT32_BAR if exact else HALF_BAR)


@settings
@hypothesis.given(
    st.lists(
        st.lists(st.integers(-(2**40), 2**40) | st.integers(-2, 8), min_size=3, max_size=3),
        max_size=9,
    ),
    st.sampled_from(["strict", "skip"]),
)
def test_any_ids(rows, policy):
    """Ids are never used as an index unchecked, and duplicates add up."""
    ids = numpy.array(rows, "int64").reshape(-1, 3)
    problem = make_problem(numpy.random.default_rng(1), tokens=len(ids))
    problem.topk_ids = ids
    layer = problem.layer(options=conclave.LayerOptions(id_policy=policy))
    wrong = ((ids < -1) | (ids > 5)).sum()
    if policy == "strict" and wrong:
        with pytest.raises(conclave.ConclaveValueError, match="topk_ids"):
            layer(problem.hidden, **problem.routing)
        return
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, problem.expected()) <= FLOAT32_BAR
    assert layer.stats().skipped_ids == wrong


ARRAYS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=3),
    st.builds(
        lambda shape, dtype: numpy.zeros(shape, dtype),
        st.lists(st.integers(0, 5), max_size=4),
        st.sampled_from(["float64", "int8", "uint16", "bool", "complex64", "float32", "U3", "O"]),
    ),
    st.builds(lambda order: numpy.zeros((9, 40), "float32", order), st.sampled_from(["C", "F"])),
)
ARGUMENTS = [row["name"] for row in _conclave.call_arguments() if not row["is_scratch"]]
SHARED = make_problem(numpy.random.default_rng(0))
SHARED_LAYER = SHARED.layer()


@hypothesis.settings(settings, max_examples=400)
@hypothesis.given(st.dictionaries(st.sampled_from(ARGUMENTS), ARRAYS, min_size=1, max_size=3))
def test_any_argument_is_taken_or_refused(changed):
    arguments = {"hidden": SHARED.hidden, **SHARED.routing, **changed}
    try:
        SHARED_LAYER.forward(**arguments)
    except conclave.Error as error:
        assert str(error)
    SHARED_LAYER.forward(SHARED.hidden, **SHARED.routing)


@settings
@hypothesis.given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 12), st.data(), st.integers(0, 2**31)
)
def test_routing_of_any_size(experts, block, tokens, data, seed):
    top_k = data.draw(st.integers(1, experts))
    logits = numpy.random.default_rng(seed).standard_normal((tokens, experts)).astype("float32")
    weights, ids, _ = conclave.fused_topk(None, data.draw(strided(logits)), top_k, True)
    numpy.testing.assert_array_equal(ids, numpy.argsort(-logits, axis=1)[:, :top_k])
    numpy.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    sorted_ids, _, end = conclave.moe_align_block_size(ids, block, experts)
    rows = sorted_ids[: int(end[0])]
    assert sorted(rows[rows < ids.size].tolist()) == list(range(ids.size))
