"""Limits of a call's choices: fewer experts, banned ones, a budget for the batch."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveValueError
from support.problems import make_problem

E, K, T = 12, 4, 17


@pytest.fixture(scope="module")
def setup():
    problem = make_problem(numpy.random.default_rng(5), experts=E, top_k=K, tokens=T)
    layer = conclave.Layer.from_tensors(problem.spec, **problem.weights, router=problem.router)
    return problem, layer


def run(layer, hidden, **limits):
    tokens = len(hidden)
    logits = numpy.empty((tokens, E), "float32")
    ids = numpy.empty((tokens, K), "int32")
    weights = numpy.empty((tokens, K), "float32")
    out = layer(
        hidden, captured_logits=logits, captured_ids=ids, captured_weights=weights, **limits
    )
    return out, logits, ids, weights


@pytest.mark.parametrize("few", [1, 3, 4])
def test_fewer_experts_are_those_of_a_smaller_k(setup, few):
    problem, layer = setup
    out, logits, ids, weights = run(layer, problem.hidden, top_k=few)
    expected_weights, expected_ids = conclave.route(logits, few, conclave.RouterSpec())
    numpy.testing.assert_array_equal(ids[:, :few], expected_ids)
    numpy.testing.assert_array_equal(weights[:, :few], expected_weights)
    assert (ids[:, few:] == -1).all() and (weights[:, few:] == 0).all()
    given = layer(problem.hidden, topk_ids=ids, topk_weights=weights)
    numpy.testing.assert_array_equal(out, given)


@pytest.mark.parametrize("form", [list, set, "flags", "rows", "torch"])
def test_banned_experts_are_not_chosen(setup, form):
    problem, layer = setup
    banned = [0, 3, 7]
    flags = numpy.zeros(E, bool)
    flags[banned] = True
    given = {"flags": flags, "rows": numpy.tile(flags, (T, 1))}.get(form)
    if form == "torch":
        given = pytest.importorskip("torch").tensor(flags)
    if given is None:
        given = form(banned)
    _, logits, ids, weights = run(layer, problem.hidden, banned_experts=given)
    assert not numpy.isin(ids, banned).any()
    masked = numpy.where(flags, -numpy.inf, logits)
    expected_weights, expected_ids = conclave.route(masked, K, conclave.RouterSpec())
    numpy.testing.assert_array_equal(ids, expected_ids)
    numpy.testing.assert_array_equal(weights, expected_weights)
    again = conclave.route(logits, K, conclave.RouterSpec(), banned_experts=given)
    numpy.testing.assert_array_equal(again[1], ids)


def test_a_budget_keeps_the_experts_with_the_largest_weights(setup):
    problem, layer = setup
    _, logits, ids, weights = run(layer, problem.hidden)
    sums = numpy.zeros(E)
    numpy.add.at(sums, ids, weights.astype("float64"))
    kept = numpy.argsort(-sums, kind="stable")[:5]
    out, _, limited, _ = run(layer, problem.hidden, expert_budget=5)
    assert set(limited.ravel()) <= set(kept)
    others = sorted(set(range(E)) - set(kept.tolist()))
    numpy.testing.assert_array_equal(out, layer(problem.hidden, banned_experts=others))
    routed = conclave.route(logits, K, conclave.RouterSpec(), expert_budget=5)
    numpy.testing.assert_array_equal(routed[1], limited)


@pytest.mark.parametrize(
    ("limits", "kind", "text"),
    [
        ({"top_k": 5}, ConclaveValueError, "1 to 4"),
        ({"top_k": 0}, ConclaveValueError, "top_k"),
        ({"top_k": 2.0}, ConclaveTypeError, "top_k"),
        ({"top_k": True}, ConclaveTypeError, "top_k"),
        ({"top_k": 2**70}, ConclaveTypeError, "top_k"),
        ({"expert_budget": 3}, ConclaveValueError, "4 to 12"),
        ({"expert_budget": 13}, ConclaveValueError, "4 to 12"),
        ({"banned_experts": range(9)}, ConclaveValueError, "at least 4"),
        ({"banned_experts": [12]}, ConclaveValueError, "0 to 11"),
        ({"banned_experts": [-1]}, ConclaveValueError, "0 to 11"),
        ({"banned_experts": [0.5]}, ConclaveTypeError, "ids"),
        ({"banned_experts": numpy.zeros(11, bool)}, ConclaveValueError, "12"),
        ({"banned_experts": numpy.zeros(E, "uint8")}, ConclaveTypeError, "banned_experts"),
    ],
)
def test_what_cannot_be_is_refused(setup, limits, kind, text):
    problem, layer = setup
    with pytest.raises(kind, match=text):
        layer(problem.hidden, **limits)


def test_a_budget_beside_given_choices_is_refused(setup):
    problem, layer = setup
    with pytest.raises(conclave.Error, match="brings its choices"):
        layer(problem.hidden, **problem.routing, expert_budget=6)
    with pytest.raises(ConclaveTypeError, match="expert_budget"):
        conclave.route(numpy.zeros((2, E), "float32"), K, conclave.RouterSpec(), expert_budget="5")
    with pytest.raises(ConclaveValueError, match="4 to 12"):
        conclave.route(numpy.zeros((2, E), "float32"), K, conclave.RouterSpec(), expert_budget=3)


def test_integers_of_numpy_and_torch_are_integers(setup):
    problem, layer = setup
    expected = layer(problem.hidden, top_k=2, expert_budget=5, banned_experts=[3])
    torch = pytest.importorskip("torch")
    for kind in (numpy.int32, numpy.int64, torch.tensor):
        limits = {"top_k": kind(2), "expert_budget": kind(5), "banned_experts": [kind(3)]}
        numpy.testing.assert_array_equal(layer(problem.hidden, **limits), expected)
    for banned in (torch.tensor(2.5), numpy.float64(2)):
        with pytest.raises(ConclaveTypeError, match="ids"):
            layer(problem.hidden, banned_experts=[banned])
    with pytest.raises(ConclaveTypeError, match="expert_budget"):
        conclave.route(
            numpy.zeros((2, E), "float32"),
            K,
            conclave.RouterSpec(),
            expert_budget=torch.tensor(5.5),
        )
