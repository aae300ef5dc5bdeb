"""Routing calls against plain float64, by vLLM's own cases and beyond."""

from __future__ import annotations

import itertools

import numpy
import pytest

import conclave
from conclave import RouterSpec, RoutingMethodType
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

NEGATIVE = -numpy.inf


def scores_of(logits, scoring):
    logits = numpy.asarray(logits).astype("float64")
    if scoring == "softmax":
        powers = numpy.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    if scoring == "sigmoid":
        return 1 / (1 + numpy.exp(-logits))
    return numpy.sqrt(numpy.log1p(numpy.exp(logits)))


def best(values, count):
    """Ids of the highest, equal values by lower id."""
    return numpy.argsort(-values, axis=1, kind="stable")[:, :count]


def reference(logits, top_k, renormalize, scoring, bias=None, groups=1, kept=1, scale=1.0):
    scores = scores_of(logits, scoring)
    chosen_by = scores if bias is None else scores + numpy.asarray(bias).astype("float64")
    if groups > 1:
        tokens, experts = scores.shape
        by_group = chosen_by.reshape(tokens, groups, experts // groups)
        if bias is None:
            group_scores = by_group.max(axis=2)
        else:
            group_scores = numpy.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
        mask = numpy.ones((tokens, groups), bool)
        numpy.put_along_axis(mask, best(group_scores, kept), False, axis=1)
        chosen_by = numpy.where(mask[:, :, None], NEGATIVE, by_group).reshape(tokens, experts)
    ids = best(chosen_by, top_k)
    weights = numpy.take_along_axis(scores, ids, axis=1)
    if renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights * scale, ids


def check(result, expected, rtol=1e-6):
    weights, ids = result[:2]
    numpy.testing.assert_array_equal(numpy.asarray(ids), expected[1])
    numpy.testing.assert_allclose(numpy.asarray(weights), expected[0], rtol=rtol)


def logits_of(tokens, experts, seed=0):
    return numpy.random.default_rng(seed).standard_normal((tokens, experts)).astype("float32")


@pytest.mark.parametrize("tokens", [0, 1, 33, 56])
@pytest.mark.parametrize(("experts", "top_k"), itertools.product([6, 16], [3, 4]))
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_fused_topk(tokens, experts, top_k, renormalize, scoring):
    logits = logits_of(tokens, experts)
    hidden = numpy.zeros((tokens, 8), "float32")
    result = conclave.fused_topk(hidden, logits, top_k, renormalize, scoring_func=scoring)
    if tokens:
        check(result, reference(logits, top_k, renormalize, scoring))
    weights, ids, indices = result
    assert weights.dtype == numpy.float32 and ids.dtype == indices.dtype == numpy.int32
    assert weights.shape == ids.shape == (tokens, top_k)
    for token, slot in itertools.product(range(tokens), range(top_k)):
        assert indices[token, slot] == slot * tokens + token


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fused_topk_of_torch(torch, dtype):
    logits = torch.tensor(logits_of(33, 16)).to(getattr(torch, dtype))
    weights, ids, _ = conclave.fused_topk(None, logits, 4, True, indices_type=torch.int64)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    check((weights, ids), reference(logits.double(), 4, True, "softmax"))
    wide = torch.zeros(33, 40, dtype=logits.dtype)
    wide[:, 3:19] = logits
    check(
        conclave.fused_topk(None, wide[:, 3:19], 4, True),
        reference(logits.double(), 4, True, "softmax"),
    )


@pytest.mark.parametrize("experts", [6, 8, 16])
def test_logits_that_are_not_numbers(experts):
    logits = logits_of(5, experts)
    logits[0] = numpy.nan
    logits[1] = -numpy.inf
    logits[2, 1:] = numpy.nan
    logits[3, 4] = numpy.inf
    weights, ids, _ = conclave.fused_topk(None, logits, 3, True)
    for row in ids:
        assert len(set(row.tolist())) == 3 and row.min() >= 0 and row.max() < experts
    assert numpy.isfinite(weights).all()
    numpy.testing.assert_array_equal(ids[:2], [[0, 1, 2]] * 2)
    assert ids[2, 0] == 0 and ids[3, 0] == 4 and weights[3, 0] == 1
    check((weights[4:], ids[4:]), reference(logits[4:], 3, True, "softmax"))


def test_ties_go_to_the_lower_id():
    logits = numpy.zeros((2, 8), "float32")
    logits[1, [3, 5]] = 1
    _, ids, _ = conclave.fused_topk(None, logits, 4, True)
    numpy.testing.assert_array_equal(ids, [[0, 1, 2, 3], [3, 5, 0, 1]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_fused_topk_bias(scoring, scale):
    logits = logits_of(32, 16)
    bias = numpy.random.default_rng(1).standard_normal(16).astype("float32")
    result = conclave.fused_topk_bias(
        None, logits, bias, 4, True, scoring_func=scoring, routed_scaling_factor=scale
    )
    check(result, reference(logits, 4, True, scoring, bias=bias, scale=scale))


def test_bias_below_minus_one_still_chooses():
    logits = logits_of(4, 16)
    bias = numpy.full(16, -5, "float32")
    check(
        conclave.fused_topk_bias(None, logits, bias, 4, True, scoring_func="sigmoid"),
        reference(logits, 4, True, "sigmoid", bias=bias),
    )


def test_tensors_of_a_router_come_by_name():
    logits = numpy.array([[1, 3, 0, 2]], dtype="float32")
    rule = RouterSpec(name="top_any")
    thresholds = numpy.array([0, 4, 0, 0], dtype="float32")
    weights, ids = conclave.route(logits, 3, rule, tensors={"expert_threshold": thresholds})
    numpy.testing.assert_array_equal(ids, [[-1, 3, 0]])
    numpy.testing.assert_array_equal(weights, [[0, 0.5, 0.5]])
    with pytest.raises(ConclaveValueError, match="expert_threshold"):
        conclave.route(logits, 3, rule)
    with pytest.raises(Exception, match="dice"):
        conclave.route(logits, 3, rule, tensors={"expert_threshold": thresholds, "dice": logits})


def test_hash_tables_say_ids():
    random = numpy.random.default_rng(0)
    logits = logits_of(9, 16)
    table = numpy.stack([random.permutation(16)[:4] for _ in range(30)]).astype("int32")
    tokens = random.integers(0, 30, 9)
    weights, ids = conclave.fused_topk_bias(
        None,
        logits,
        None,
        4,
        True,
        scoring_func="sqrtsoftplus",
        input_tokens=tokens,
        hash_indices_table=table,
        routed_scaling_factor=2.5,
    )
    numpy.testing.assert_array_equal(ids, table[tokens])
    scores = numpy.take_along_axis(scores_of(logits, "sqrtsoftplus"), table[tokens], axis=1)
    numpy.testing.assert_allclose(
        weights, 2.5 * scores / scores.sum(axis=1, keepdims=True), rtol=1e-6
    )
    for bad in (30, -1):
        with pytest.raises(ConclaveValueError, match="token_ids"):
            conclave.fused_topk_bias(
                None,
                logits[:1],
                None,
                4,
                True,
                input_tokens=numpy.array([bad]),
                hash_indices_table=table,
            )
    table[tokens[0], 2] = 16
    with pytest.raises(ConclaveValueError, match="hash_table"):
        conclave.fused_topk_bias(
            None, logits, None, 4, True, input_tokens=tokens, hash_indices_table=table
        )


@pytest.mark.parametrize("tokens", [1, 33, 64])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "kept"),
    [(16, 2, 8, 2), (64, 6, 8, 4), (32, 4, 4, 2), (256, 8, 8, 4), (16, 2, 1, 1), (16, 2, 0, 0)],
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_grouped_topk(tokens, experts, top_k, groups, kept, scoring, biased, scale):
    logits = logits_of(tokens, experts)
    bias = numpy.random.default_rng(3).standard_normal(experts).astype("float32")
    bias = bias if biased else None
    result = conclave.grouped_topk(
        numpy.zeros((tokens, 4)),
        logits,
        top_k,
        True,
        groups,
        kept,
        scoring_func=scoring,
        routed_scaling_factor=scale,
        e_score_correction_bias=bias,
    )
    expected = reference(logits, top_k, True, scoring, bias, groups, kept, scale)
    check(result, expected)


@pytest.mark.parametrize(
    ("method", "weights_of"),
    [
        ("Default", lambda x, k: reference(x, k, False, "softmax")),
        ("RenormalizeNaive", lambda x, k: reference(x, k, True, "softmax")),
        ("Renormalize", lambda x, k: reference(x, k, True, "softmax")),
        ("SigmoidRenorm", lambda x, k: reference(x, k, True, "sigmoid")),
        ("Sigmoid", lambda x, k: reference(x, k, False, "sigmoid")),
        ("Llama4", lambda x, k: reference(x, k, False, "sigmoid")),
    ],
)
def test_routing_methods_by_name(method, weights_of):
    logits = logits_of(20, 16)
    rule = RoutingMethodType[method].router_spec()
    check(conclave.route(logits, 4, rule), weights_of(logits, 4))


def test_routing_method_numbers_are_vllms():
    numbers = {kind.name: int(kind) for kind in RoutingMethodType}
    assert numbers == {
        "Default": 0,
        "Renormalize": 1,
        "DeepSeekV3": 2,
        "Llama4": 3,
        "RenormalizeNaive": 4,
        "TopK": 5,
        "SigmoidRenorm": 6,
        "MiniMax2": 7,
        "Sigmoid": 8,
        "Unspecified": 9,
        "DeepseekV4": 100,
        "Custom": 101,
        "Simulated": 102,
    }
    for kind in RoutingMethodType:
        if kind.name in ("Unspecified", "Custom"):
            with pytest.raises(ConclaveUnsupportedError, match=kind.name):
                kind.router_spec()
        else:
            assert isinstance(kind.router_spec(), RouterSpec)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("softmax", 4, True), "RenormalizeNaive"),
        (("softmax", 4, False), "Default"),
        (("sigmoid", 4, True), "SigmoidRenorm"),
        (("sigmoid", 4, False), "Sigmoid"),
        (("sigmoid", 4, True, 8, True), "DeepSeekV3"),
        (("sigmoid", 4, True, None, True, 1.0), "MiniMax2"),
        (("sigmoid", 4, True, None, True, None), "MiniMax2"),
        (("sigmoid", 4, True, None, True, 2.5), "MiniMax2"),
        (("sigmoid", 4, False, 8, True), "Unspecified"),
        (("softmax", 4, True, 8, True), "Unspecified"),
        (("sqrtsoftplus", 4, True), "DeepseekV4"),
        (("sqrtsoftplus", 4, False), "Unspecified"),
    ],
)
def test_routing_method_of_arguments(arguments, expected):
    assert conclave.get_routing_method_type(*arguments) == RoutingMethodType[expected]


def test_simulated_routing_reads_no_logits():
    logits = logits_of(40, 16)
    rule = RoutingMethodType.Simulated.router_spec()
    weights, ids = conclave.route(logits, 4, rule)
    again = conclave.route(logits * 3, 4, rule)
    numpy.testing.assert_array_equal(ids, again[1])
    assert (weights == 0.25).all()
    assert all(len(set(row.tolist())) == 4 for row in ids)


def test_options_are_named_numbers():
    rule = RouterSpec(options={"b": 2, "a": 1})
    assert rule == RouterSpec(options=(("a", 1), ("b", 2)))
    assert hash(rule) == hash(RouterSpec(options={"a": 1, "b": 2}))
    assert conclave.spec.to_dict(rule)["options"] == {"a": 1, "b": 2}
    with pytest.raises(ConclaveValueError, match=r"options\[a\]"):
        conclave.route(logits_of(4, 16), 2, rule)
    with pytest.raises(ConclaveTypeError, match="a dictionary of numbers"):
        conclave.route(logits_of(4, 16), 2, RouterSpec(options={"a": "much"}))


def test_bad_arguments_are_named():
    logits = logits_of(4, 16)
    cases = [
        (
            ConclaveValueError,
            "gating_output",
            lambda: conclave.fused_topk(None, logits[0], 2, True),
        ),
        (ConclaveValueError, "tokens", lambda: conclave.fused_topk(logits[:3], logits, 2, True)),
        (ConclaveValueError, "topk", lambda: conclave.fused_topk(None, logits, 17, True)),
        (ConclaveValueError, "topk", lambda: conclave.fused_topk(None, logits, 0, True)),
        (
            ConclaveTypeError,
            "gating_output",
            lambda: conclave.fused_topk(None, logits.astype("int32"), 2, True),
        ),
        (
            ConclaveValueError,
            "gating_output",
            lambda: conclave.fused_topk(None, numpy.asfortranarray(logits), 2, True),
        ),
        (
            ConclaveValueError,
            "scoring_func",
            lambda: conclave.fused_topk(None, logits, 2, True, scoring_func="tanh"),
        ),
        (
            ConclaveValueError,
            "num_groups",
            lambda: conclave.grouped_topk(None, logits, 2, True, 3, 1),
        ),
        (
            ConclaveValueError,
            "kept groups",
            lambda: conclave.grouped_topk(None, logits, 5, True, 8, 2),
        ),
        (
            ConclaveValueError,
            "selection_bias",
            lambda: conclave.grouped_topk(
                None, logits, 2, True, 8, 2, e_score_correction_bias=numpy.zeros(8, "float32")
            ),
        ),
        (
            ConclaveValueError,
            "not a number",
            lambda: conclave.fused_topk_bias(
                None, logits, numpy.full(16, numpy.nan, "float32"), 2, True
            ),
        ),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
