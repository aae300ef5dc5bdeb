"""Routers of conclave.vllm: the factory's choice, rules against float64, replicas, capture, padding
and the simulator."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from support.devices import seeded  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

E, K, T = 16, 4, 33
METHODS = vllm.RoutingMethodType
VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


def tokens(columns=E, count=T):
    generator = seeded(3)
    return torch.randn(count, 8, generator=generator), torch.randn(
        count, columns, generator=generator
    )


def bias_of(columns=E):
    return torch.randn(columns, generator=seeded(4)) * 0.9


def make(**arguments):
    return vllm.create_fused_moe_router(**{"top_k": K, "global_num_experts": E, **arguments})


def eager(logits, score="softmax", bias=None, renormalize=True, scale=1.0, groups=None, kept=None):
    """The published rule in float64: weights and ids, the best first."""
    values = logits.double()
    if score == "softmax":
        scores = torch.softmax(values, -1)
    elif score == "sigmoid":
        scores = torch.sigmoid(values)
    else:
        scores = torch.nn.functional.softplus(values).sqrt()
    choice = scores if bias is None else scores + bias.double()
    if groups is not None and groups > 1:
        parts = choice.view(len(logits), groups, -1)
        best = parts.amax(-1) if bias is None else parts.topk(2, -1).values.sum(-1)
        mask = torch.ones_like(best).scatter_(1, best.topk(kept, -1).indices, 0).bool()
        choice = parts.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(K, -1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * scale, ids


def same(found, expected):
    """Equal choices, whatever the order of slots."""
    (weights, ids), (wanted, wanted_ids) = found, expected
    order, wanted_order = ids.long().argsort(1), wanted_ids.argsort(1)
    assert torch.equal(ids.long().gather(1, order), wanted_ids.gather(1, wanted_order))
    torch.testing.assert_close(
        weights.double().gather(1, order), wanted.gather(1, wanted_order), rtol=1e-6, atol=1e-7
    )


def first_experts(hidden_states, gating_output, topk, renormalize):
    ids = torch.arange(topk).repeat(len(hidden_states), 1)
    return torch.full(ids.shape, 1 / topk, dtype=torch.float16), ids.short()


# The factory.

GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
ONE_GROUP = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("arguments", "kind", "method"),
    [
        ({}, vllm.FusedTopKRouter, METHODS.RenormalizeNaive),
        ({"renormalize": False}, vllm.FusedTopKRouter, METHODS.Default),
        ({"scoring_func": "sigmoid"}, vllm.FusedTopKRouter, METHODS.SigmoidRenorm),
        ({"e_score_correction_bias": bias_of()}, vllm.FusedTopKBiasRouter, METHODS.Unspecified),
        (
            {"e_score_correction_bias": bias_of(), "scoring_func": "sigmoid"},
            vllm.FusedTopKBiasRouter,
            METHODS.MiniMax2,
        ),
        (GROUPS, vllm.GroupedTopKRouter, METHODS.RenormalizeNaive),
        (
            {**GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": bias_of()},
            vllm.GroupedTopKRouter,
            METHODS.DeepSeekV3,
        ),
        (ONE_GROUP, vllm.FusedTopKRouter, METHODS.RenormalizeNaive),
        (
            {**ONE_GROUP, "e_score_correction_bias": bias_of(), "routed_scaling_factor": 1.1},
            vllm.FusedTopKBiasRouter,
            METHODS.Unspecified,
        ),
        (
            {**ONE_GROUP, "e_score_correction_bias": bias_of(), "scoring_func": "sigmoid"},
            vllm.GroupedTopKRouter,
            METHODS.DeepSeekV3,
        ),
        ({**ONE_GROUP, "routed_scaling_factor": 1.1}, vllm.GroupedTopKRouter, None),
        ({"custom_routing_function": first_experts}, vllm.CustomRoutingRouter, METHODS.Custom),
        (
            {
                "zero_expert_type": "identity",
                "e_score_correction_bias": bias_of(),
                "num_logical_experts": 12,
                **GROUPS,
            },
            vllm.ZeroExpertRouter,
            METHODS.Unspecified,
        ),
    ],
)
def test_the_factory_chooses_by_the_arguments(arguments, kind, method):
    router = make(**arguments)
    assert type(router) is kind
    assert method in (None, router.routing_method_type)


@pytest.mark.parametrize("arguments", [
    {"renormalize": r, "scoring_func": s, "routed_scaling_factor": f, "bias": b, **g}
    for r in (True, False)
    for s in ("softmax", "sigmoid", "sqrtsoftplus")
    for f, b, g in ((1.0, False, {}), (1.1, True, {}), (2.5, True, GROUPS), (1.1, False, GROUPS),
                    (1.1, False, ONE_GROUP), (1.1, True, ONE_GROUP), (1.5, False, {}))
])  # fmt: skip
def test_rules_are_those_of_float64(arguments):
    given = dict(arguments)
    bias = bias_of() if given.pop("bias") else None
    hidden, logits = tokens()
    found = make(**given, e_score_correction_bias=bias).select_experts(hidden, logits)
    expected = eager(
        logits,
        given["scoring_func"],
        bias,
        given["renormalize"],
        given["routed_scaling_factor"],
        given.get("num_expert_group"),
        given.get("topk_group"),
    )
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.int32
    same(found, expected)


def test_hash_tables_and_functions():
    table = torch.randint(0, E, (20, K), generator=seeded(6), dtype=torch.int32)
    router = make(hash_indices_table=table, scoring_func="sqrtsoftplus")
    hidden, logits = tokens()
    words = torch.arange(T) % 20
    _, ids = router.select_experts(hidden, logits, input_ids=words)
    assert torch.equal(ids, table[words])
    with pytest.raises(ConclaveValueError, match="input_ids"):
        router.select_experts(hidden, logits)
    weights, ids = make(custom_routing_function=first_experts).select_experts(hidden, logits)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids[0].tolist() == [0, 1, 2, 3] and weights.sum() == T
    first_experts.routing_method_type = METHODS.Llama4
    try:
        named = make(custom_routing_function=first_experts)
        assert named.routing_method_type is METHODS.Llama4
    finally:
        del first_experts.routing_method_type


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_type_of_ids(kind):
    hidden, logits = tokens()
    by_call = make().select_experts(hidden, logits, topk_indices_dtype=kind)[1]
    by_getter = make(indices_type_getter=lambda: kind).select_experts(hidden, logits)[1]
    assert by_call.dtype == by_getter.dtype == kind
    with pytest.raises(ConclaveTypeError, match="topk_indices_dtype"):
        make().select_experts(hidden, logits, topk_indices_dtype=torch.float32)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": E + 1}, "top_k"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({**GROUPS, "topk_group": None}, "topk_group"),
        ({**GROUPS, "custom_routing_function": first_experts}, "custom_routing_function"),
        ({"custom_routing_function": 3}, "custom_routing_function"),
        ({"zero_expert_type": "identity"}, "num_logical_experts"),
        ({"zero_expert_type": "identity", "num_logical_experts": 8}, "e_score_correction_bias"),
        (
            {
                "zero_expert_type": "copy",
                "num_logical_experts": 8,
                "e_score_correction_bias": bias_of(),
            },
            "zero_expert_type",
        ),
        ({"enable_eplb": True}, "eplb_state"),
    ],
)
def test_arguments_that_do_not_go_say_why(arguments, name):
    with pytest.raises(Error, match=name):
        make(**arguments)
    with pytest.raises(ConclaveUnsupportedError, match="num_fused_shared_experts"):
        make(num_fused_shared_experts=1)


# Replicas, capture, zero experts, padding.


def eplb_state(slots=20):
    state = vllm.EplbLayerState()
    table = torch.full((E, 2), -1)
    table[:, 0] = torch.arange(E)
    table[: slots - E, 1] = torch.arange(E, slots)
    state.logical_to_physical_map = table
    state.logical_replica_count = (table >= 0).sum(1)
    state.expert_load_view = torch.zeros(slots, dtype=torch.int32)
    return state


def test_replicas_are_chosen_counted_and_captured_as_experts():
    state, seen = eplb_state(), []
    router = make(global_num_experts=20, eplb_state=state)
    assert router.enable_eplb
    router.set_capture_fn(lambda ids: seen.append(ids.clone()))
    hidden, logits = tokens()
    _, ids = router.select_experts(hidden, logits, num_tokens=10)
    logical = eager(logits)[1]
    assert torch.equal(seen[0].long().sort(1).values, logical.sort(1).values)
    owner = torch.cat([torch.arange(E), torch.arange(4)])
    assert torch.equal(owner[ids.long()], seen[0].long())
    assert (ids >= E).any()
    counted = torch.bincount(ids[:10].flatten(), minlength=20)
    assert torch.equal(state.expert_load_view.long(), counted)
    off = make(global_num_experts=20, eplb_state=eplb_state(), enable_eplb=False)
    assert torch.equal(off.select_experts(hidden, logits)[1], seen[0])
    with pytest.raises(ConclaveValueError, match="set_eplb_state"):
        make(eplb_state=vllm.EplbLayerState()).select_experts(hidden, logits)


def test_zero_experts_of_a_router():
    bias = torch.zeros(E + 4)
    router = make(zero_expert_type="identity", num_logical_experts=E, e_score_correction_bias=bias)
    hidden, logits = tokens(E + 4)
    weights, ids = router.select_experts(hidden, logits)
    wanted, chosen = eager(logits)
    zero = chosen >= E
    assert zero.any()
    assert torch.equal(ids.long().sort(1).values, torch.where(zero, -1, chosen).sort(1).values)
    assert (weights[ids < 0] == 0).all()
    share = torch.where(zero, wanted, 0).sum(1, keepdim=True)
    twin = copy.deepcopy(router)
    out = router.zero_expert_output
    torch.testing.assert_close(out.double(), hidden.double() * share, rtol=1e-5, atol=1e-6)
    assert router.zero_expert_output is None and twin.zero_expert_output is None
    assert torch.equal(twin.select_experts(hidden, logits)[1], ids)


SIZES = {"num_experts": E, "top_k": K, "hidden_size": 8, "intermediate_size": 24}


def filled(**arguments):
    layer = vllm.FusedMoE(**{**SIZES, **arguments})
    generator = seeded(9)
    for param in layer.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) / 4)
    return layer


@pytest.mark.parametrize("with_eplb", [False, True])
@pytest.mark.parametrize("own_router", [False, True])
def test_padding_chooses_no_expert(with_eplb, own_router):
    class Own:
        def select_experts(self, hidden_states, router_logits):
            return first_experts(hidden_states, router_logits, K, True)

    layer = filled(enable_eplb=with_eplb, router=Own() if own_router else None)
    if with_eplb:
        state = eplb_state(E)
        layer.set_eplb_state(
            0,
            state.expert_load_view[None],
            state.logical_to_physical_map[None],
            state.logical_replica_count[None],
        )
    hidden, logits = tokens()
    plain = layer(hidden, logits)
    mask = torch.arange(T) % 3 != 1
    seen = []
    layer.set_capture_fn(seen.append)
    if with_eplb:
        state.expert_load_view.zero_()
    out = layer(hidden, logits, padding_mask=mask)
    assert torch.equal(out[mask], plain[mask]) and (out[~mask] == 0).all()
    assert (seen[0][~mask] == -1).all() and (seen[0][mask] >= 0).all()
    if with_eplb:
        assert state.expert_load_view.sum() == K * int(mask.sum())
    assert not layer(hidden, logits, padding_mask=torch.zeros(T, dtype=torch.bool)).any()
    with pytest.raises(ConclaveTypeError, match="padding_mask"):
        layer(hidden, logits, padding_mask=mask.int())
    with pytest.raises(ConclaveValueError, match="padding_mask"):
        layer(hidden, logits, padding_mask=mask[1:])


# Routers of a layer.


class Rotating(vllm.BaseRouter):
    """Token t goes to experts t, t + 1, ..."""

    routing_method_type = METHODS.Custom

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        first = torch.arange(len(hidden_states)).unsqueeze(1)
        ids = (first + torch.arange(self.top_k)) % E
        return torch.full(ids.shape, 0.25), ids


def test_a_router_of_your_own_gets_the_state_of_the_layer():
    router = Rotating(K, 20)
    layer = filled(router=router, enable_eplb=True, num_redundant_experts=4)
    assert layer.router is router and router.eplb_state is layer.eplb_state
    assert layer.routing_method_type is METHODS.Custom is layer.moe_config.routing_method
    hidden, logits = tokens()
    with pytest.raises(ConclaveValueError, match="set_eplb_state"):
        layer(hidden, logits)
    state = eplb_state()
    layer.set_eplb_state(
        0,
        state.expert_load_view[None],
        state.logical_to_physical_map[None],
        state.logical_replica_count[None],
    )
    layer(hidden, logits)
    assert state.expert_load_view.sum() == T * K
    ids = layer.select_experts(hidden, logits, topk_indices_dtype=torch.int32)[1]
    assert ids.dtype == torch.int32 and (ids >= E).any()
    with pytest.raises(ConclaveValueError, match="router"):
        filled(router=router, enable_eplb=True, num_redundant_experts=4)
    with pytest.raises(ConclaveValueError, match="top_k"):
        filled(router=Rotating(2, E))


def test_objects_are_told_what_they_have_names_for():
    told = {}

    class Wants:
        def select_experts(self, hidden_states, router_logits, input_ids=None):
            told["input_ids"] = input_ids
            return first_experts(hidden_states, router_logits, K, True)

    class Overrides(Rotating):
        def select_experts(self, hidden_states, router_logits, topk_indices_dtype=None, **more):
            told["dtype"], told["more"] = topk_indices_dtype, more
            return super().select_experts(hidden_states, router_logits, topk_indices_dtype)

    hidden, logits = tokens()
    words = torch.arange(T)
    layer = filled(router=Wants())
    layer(hidden, logits, input_ids=words)
    assert told["input_ids"] is words
    own = Overrides(K, E)
    layer = filled(router=own)
    assert layer.router is own
    ids = layer.select_experts(hidden, logits, topk_indices_dtype=torch.int64)[1]
    assert told["dtype"] is torch.int64 and ids[1].tolist() == [1, 2, 3, 4]
    with pytest.raises(ConclaveTypeError, match="router"):
        filled(router=object())


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (None, ConclaveTypeError),
        ((torch.ones(T, K), None), ConclaveTypeError),
        ((torch.ones(T, K), torch.ones(T, K)), ConclaveTypeError),
        ((torch.ones(T, K), torch.ones(T, 2, dtype=torch.int32)), ConclaveValueError),
        ((torch.ones(2, K), torch.ones(2, K, dtype=torch.int32)), ConclaveValueError),
    ],
)
def test_what_a_function_returns_is_checked(found, error):
    class Own(vllm.FusedTopKRouter):
        def _compute_routing(self, *_, **__):
            return found

    for given in ({"custom_routing_function": lambda **_: found}, {"router": Own(K, E)}):
        layer = filled(**given)
        with pytest.raises(error):
            layer(*tokens())


def test_layers_with_routers_are_copied_and_stored():
    bias = torch.zeros(E + 2)
    layer = filled(zero_expert_type="identity", e_score_correction_bias=bias)
    hidden, logits = tokens(E + 2)
    out = layer(hidden, logits)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(hidden, logits), out)


# The simulator.


def test_strategies_by_name(caplog):
    simulator = vllm.RoutingSimulator
    assert simulator.get_available_strategies()[:2] == ["uniform_random", "normal_routing"]
    hidden, logits = tokens(count=4000)
    torch.manual_seed(0)
    weights, ids = simulator.simulate_routing(hidden, logits, "uniform_random", K, torch.int32)
    assert (weights == 1).all() and ids.dtype == torch.int32
    share = torch.bincount(ids.flatten(), minlength=E) / ids.numel()
    assert (share - 1 / E).abs().max() < 0.01
    weights, ids = simulator.simulate_routing(hidden, logits, "normal_routing", K)
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    assert ids.min() >= 0 and ids.max() < E
    counts = torch.bincount(ids.flatten(), minlength=E)
    assert counts[E // 2] > 2 * counts[0]  # the middle is likelier
    info = vllm.DistributionBasedRouting("normal", std=2.0).get_distribution_info()
    assert info == {"distribution": "normal", "parameters": {"mean": 0.0, "std": 2.0}}
    for wrong in ({"distribution": "zipf"}, {"rate": 1}, {"distribution": "normal", "std": -1}):
        with pytest.raises(ConclaveValueError):
            vllm.DistributionBasedRouting(**wrong)


class Last(vllm.RoutingStrategy):
    def route_tokens(self, hidden_states, router_logits, top_k, indices_type=None):
        shape = (len(hidden_states), top_k)
        last = router_logits.shape[1] - 1
        return torch.ones(shape), torch.full(shape, last, dtype=torch.int64), None


def test_the_environment_names_a_strategy(monkeypatch, caplog):
    monkeypatch.setattr(vllm.RoutingSimulator, "_strategies", dict(
        vllm.RoutingSimulator._strategies))  # fmt: skip
    vllm.RoutingSimulator.register_strategy("last", Last())
    assert "last" in vllm.RoutingSimulator.get_available_strategies()
    monkeypatch.setenv(VARIABLE, "last")
    seen = []
    layer = filled(zero_expert_type="identity", e_score_correction_bias=torch.zeros(E + 2))
    assert type(layer.router) is vllm.RoutingSimulatorRouter
    assert layer.routing_method_type is METHODS.Simulated
    layer.set_capture_fn(seen.append)
    hidden, logits = tokens(E + 2)
    with caplog.at_level(logging.WARNING, "conclave.vllm"):
        layer(hidden, logits)
        layer(hidden, logits)
    assert (seen[0] == E - 1).all()  # not a zero expert
    assert sum("last" in record.message for record in caplog.records) == 1
    own = Rotating(K, E)
    assert filled(router=own).router is own  # which was asked for by name
    monkeypatch.setenv(VARIABLE, "unknown")
    with pytest.raises(ConclaveValueError, match="uniform_random"):
        filled()
    with pytest.raises(ConclaveTypeError, match="strategy"):
        vllm.RoutingSimulator.register_strategy("x", object())
    monkeypatch.delenv(VARIABLE)
    assert type(filled().router) is vllm.FusedTopKRouter


@pytest.mark.parametrize("columns", [E - 1, E + 1])
@pytest.mark.parametrize(
    "rule",
    [{}, {"scoring_func": "sigmoid"}, {"use_grouped_topk": True, "num_expert_group": 1,
                                       "topk_group": 1}],
)  # fmt: skip
def test_logits_of_other_experts_are_refused(columns, rule):
    """Also if no token chooses the one that is not there."""
    layer = vllm.FusedMoE(E, K, 8, 16, params_dtype=torch.float32, **rule)
    hidden, logits = tokens(columns)
    logits[:, E:] = -50
    with pytest.raises(ConclaveValueError, match=f"router_logits: expected {E} columns"):
        layer.select_experts(hidden, logits)


def test_a_function_may_take_other_logits():
    def choose(hidden_states, gating_output, topk, renormalize):
        return gating_output[:, :topk], gating_output[:, topk:].int()

    layer = vllm.FusedMoE(E, K, 8, 16, params_dtype=torch.float32, custom_routing_function=choose)
    weights, ids = torch.rand(T, K), torch.randint(0, E, (T, K), generator=seeded(1))
    found = layer.select_experts(torch.zeros(T, 8), torch.cat((weights, ids.float()), 1))
    assert torch.equal(found[0], weights) and torch.equal(found[1].long(), ids)


def test_hash_tables_of_64_bit_ids():
    table = torch.randint(0, E, (9, K), generator=seeded(2))
    hidden, logits = tokens()
    words = torch.randint(0, 9, (T,), generator=seeded(5))
    wide, narrow = make(hash_indices_table=table), make(hash_indices_table=table.int())
    for given in (words, words.int(), words[:0]):
        found, wanted = (
            router.select_experts(hidden[: len(given)], logits[: len(given)], input_ids=given)
            for router in (wide, narrow)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if table.is_cuda:  # where such tokens choose nothing
        return
    table[int(words[0])] = 2**32  # which 32 bits would read as 0
    with pytest.raises(ConclaveValueError, match="names an expert that does not exist"):
        wide.select_experts(hidden, logits, input_ids=words)
    words[3] = 9
    with pytest.raises(ConclaveValueError, match="at token 3; found 9; limit 0 to 8"):
        wide.select_experts(hidden, logits, input_ids=words)


@pytest.mark.parametrize(
    "table", [torch.zeros(K, dtype=torch.int32), torch.zeros(9, K + 1, dtype=torch.int32),
              torch.zeros(9, K)]
)  # fmt: skip
def test_tables_that_are_none_are_refused_when_a_router_is_made(table):
    with pytest.raises((ConclaveValueError, ConclaveTypeError), match="hash_indices_table: "):
        make(hash_indices_table=table)
