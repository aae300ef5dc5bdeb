"""conclave.vllm.FusedMoE: routing by its arguments, loading, ranks and replicas."""

from __future__ import annotations

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
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    fp8_rows,
    quantise_weights,
    random_case,
    worst_quantised_error,
)

pytestmark = pytest.mark.usefixtures("device")

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}


def filled(seed=0, **arguments):
    """A layer with random weights."""
    layer = vllm.FusedMoE(**{**SIZES, **arguments})
    generator = seeded(seed)
    for param in layer.parameters():
        if param.dtype.is_floating_point and param.dtype != torch.float8_e4m3fn:
            param.data.copy_(torch.randn(param.shape, generator=generator) / 4)
    return layer


def tokens(seed=1, count=11, dtype=torch.float32, experts=8):
    generator = seeded(seed)
    hidden = torch.randn(count, 48, generator=generator).to(dtype)
    return hidden, torch.randn(count, experts, generator=generator).to(dtype)


def reference(layer, hidden, weights, ids, **more):
    return experts_reference(
        hidden, layer.w13_weight, layer.w2_weight, weights, ids, layer.activation.value, **more
    )


def check(actual, expected, limit=FLOAT32_BAR):
    assert worst_error(actual, expected) <= limit


def plain_topk(logits, top_k, renormalize, score=torch.softmax, bias=None, scale=1.0):
    """Eager top-k in float64."""
    values = logits.double()
    scores = torch.softmax(values, -1) if score is torch.softmax else score(values)
    choice = scores if bias is None else scores + bias.double()
    ids = torch.topk(choice, top_k, dim=1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * scale, ids


# Routing.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_plain_routing(dtype, renormalize, scoring_func):
    layer = filled(params_dtype=dtype, renormalize=renormalize, scoring_func=scoring_func)
    hidden, logits = tokens(dtype=dtype)
    score = torch.softmax if scoring_func == "softmax" else torch.sigmoid
    routing = plain_topk(logits, 2, renormalize, score)
    out = layer(hidden, logits)
    assert out.dtype == dtype
    limit = FLOAT32_BAR if dtype == torch.float32 else HALF_BAR
    check(out, reference(layer, hidden, *routing), limit)


@pytest.mark.parametrize("on_output", [False, True])
def test_bias_and_scale(on_output):
    bias = torch.linspace(-2, 2, 8)
    layer = filled(
        scoring_func="sigmoid",
        e_score_correction_bias=bias,
        routed_scaling_factor=2.5,
        apply_routed_scale_to_output=on_output,
    )
    hidden, logits = tokens()
    routing = plain_topk(logits, 2, True, torch.sigmoid, bias, 2.5)
    check(layer(hidden, logits), reference(layer, hidden, *routing))


@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_routing(with_bias):
    bias = torch.linspace(0, 0.3, 8) if with_bias else None
    layer = filled(
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        e_score_correction_bias=bias,
    )
    hidden, logits = tokens()
    scores = torch.sigmoid(logits.double())
    choice = scores + bias.double() if with_bias else scores
    groups = choice.view(-1, 4, 2)
    best = torch.topk(groups.sum(-1) if with_bias else groups.amax(-1), 2, dim=1).indices
    kept = torch.zeros(11, 4, dtype=torch.bool).scatter_(1, best, True)
    choice = choice.masked_fill(~kept.repeat_interleave(2, 1), -torch.inf)
    ids = torch.topk(choice, 2, dim=1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True)
    check(layer(hidden, logits), reference(layer, hidden, weights, ids))
    expected = vllm.RoutingMethodType.DeepSeekV3 if with_bias else None
    assert expected in (None, layer.moe_config.routing_method)


def test_custom_routing_function_and_router():
    def first_two(hidden_states, gating_output, topk, renormalize):
        ids = torch.arange(topk).repeat(len(hidden_states), 1)
        return torch.full(ids.shape, 0.5, dtype=torch.bfloat16), ids

    class Router:
        def select_experts(self, hidden_states, router_logits):
            return first_two(hidden_states, router_logits, 2, True)

    hidden, logits = tokens()
    ids = torch.tensor([[0, 1]]).repeat(11, 1)
    for argument in ({"custom_routing_function": first_two}, {"router": Router()}):
        layer = filled(**argument)
        check(layer(hidden, logits), reference(layer, hidden, torch.full(ids.shape, 0.5), ids))
        assert layer.moe_config.routing_method is vllm.RoutingMethodType.Custom


def test_hash_table():
    table = torch.tensor([[0, 1], [6, 7], [3, 2]], dtype=torch.int32)
    layer = filled(hash_indices_table=table, scoring_func="sqrtsoftplus")
    hidden, logits = tokens()
    words = torch.arange(11) % 3
    ids = table[words].long()
    weights = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True)
    check(layer(hidden, logits, input_ids=words), reference(layer, hidden, weights, ids))
    with pytest.raises(ConclaveValueError, match="input_ids"):
        layer(hidden, logits)


def test_zero_experts_return_the_token():
    bias = torch.zeros(11)
    bias[8:] = 0.2
    layer = filled(zero_expert_type="identity", e_score_correction_bias=bias, renormalize=False)
    hidden, logits = tokens(experts=11)
    weights, ids = plain_topk(logits, 2, False, bias=bias)
    zero = ids >= 8
    assert zero.any() and not zero.all()
    expected = reference(layer, hidden, weights, torch.where(zero, -1, ids))
    expected += hidden.double() * torch.where(zero, weights, 0).sum(1, keepdim=True)
    check(layer(hidden, logits), expected)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"use_grouped_topk": True, "topk_group": 1}, "num_expert_group"),
        ({"use_grouped_topk": True, "num_expert_group": 2}, "topk_group"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"activation": "tanh"}, "activation"),
        ({"top_k": 9}, "top_k"),
        ({"num_redundant_experts": 2}, "num_redundant_experts"),
        ({"tp_size": 2}, "tp_size"),
        ({"runner_cls": object}, "runner_cls"),
        ({"routed_experts_args": {"a": 1}}, "routed_experts_args"),
        ({"zero_expert_type": "identity"}, "e_score_correction_bias"),
        ({"quant_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"quant_config": vllm.FusedMoEQuantConfig.make("int8", weight_dtype="mxfp4")}, "mxfp4"),
        ({"quant_config": {"quant_method": "exl2"}}, "exl2"),
        ({"quant_config": 3}, "quant_config"),
    ],
)
def test_arguments_that_do_not_go_say_why(arguments, name):
    with pytest.raises(Error, match=name):
        vllm.FusedMoE(**{**SIZES, **arguments})


# Modules beside the experts.


def test_gate_shared_experts_and_transforms():
    torch.manual_seed(0)
    gate = torch.nn.Linear(64, 8, bias=False)
    shared, shared_gate = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    down, up = torch.nn.Linear(64, 48), torch.nn.Linear(48, 64)
    modules = {
        "gate": gate,
        "shared_experts": shared,
        "shared_expert_gate": shared_gate,
        "routed_input_transform": down,
        "routed_output_transform": up,
    }
    layer = filled(**modules)
    hidden = torch.randn(11, 64)
    with torch.no_grad():
        logits, inner = gate(hidden), down(hidden)
        routed = up(reference(layer, inner, *plain_topk(logits, 2, True)).float())
        expected = (routed + torch.sigmoid(shared_gate(hidden)) * shared(hidden)).double()
        check(layer(hidden), expected, 1e-5)
        assert layer.is_internal_router and layer.gate is gate
        apart = filled(**modules, return_shared_apart=True)
        shared_rows, routed_rows = apart(hidden)
        assert shared_rows.shape == hidden.shape
    check(routed_rows, routed.double(), 1e-5)
    assert len(layer.get_expert_weights()) == 2  # none of the modules'


def test_logits_are_needed_without_a_gate():
    with pytest.raises(ConclaveValueError, match="router_logits"):
        filled()(tokens()[0])


# Loading.


def mixtral(layer_name, generator, gated=True, experts=8, inner=40):
    """Checkpoint tensors by name, and the same stacked."""
    found, w13, w2 = {}, [], []
    for expert in range(experts):
        gate = torch.randn(inner, 48, generator=generator)
        up = torch.randn(inner, 48, generator=generator)
        down = torch.randn(48, inner, generator=generator)
        found[f"{expert}.w1.weight"], found[f"{expert}.w2.weight"] = gate, down
        if gated:
            found[f"{expert}.w3.weight"] = up
        w13.append(torch.cat([gate, up]) if gated else gate)
        w2.append(down)
    return found, torch.stack(w13), torch.stack(w2)


MAPPING = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 8)


def test_load_weights():
    layer = filled(prefix="model.layers.3.experts", expert_mapping=MAPPING)
    found, w13, w2 = mixtral(layer.layer_name, seeded(5))
    hidden, logits = tokens()
    layer(hidden, logits)
    taken = layer.load_weights([*found.items(), ("0.other.weight", torch.zeros(1))])
    assert sorted(taken) == sorted(["w13_weight"] * 16 + ["w2_weight"] * 8)
    assert torch.equal(layer.w13_weight, w13) and torch.equal(layer.w2_weight, w2)
    # The packed layer follows.
    check(layer(hidden, logits), reference(layer, hidden, *plain_topk(logits, 2, True)))
    assert layer.layer_id == 3


def test_load_by_the_newer_prefix():
    rows = vllm.fused_moe_make_expert_params_mapping(None, "w1", "w2", "w3", 8)
    layer = filled(prefix="model.layers.4.experts", expert_mapping=rows)
    found, w13, _ = mixtral(layer.layer_name, seeded(5))
    assert len(layer.load_weights(found.items())) == 24
    assert torch.equal(layer.w13_weight, w13)


def test_loading_needs_a_mapping_and_names_do_not_repeat():
    layer = filled(prefix="a.0.experts")
    with pytest.raises(ConclaveValueError, match="expert_mapping"):
        layer.load_weights([])
    with pytest.raises(ConclaveValueError, match="Duplicate layer name"):
        filled(prefix="a.0.experts")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_ranks_sum_to_the_whole(gated, tp_size):
    generator = seeded(5)
    activation = "silu" if gated else "relu2_no_mul"
    found, w13, w2 = mixtral("x", generator, gated)
    bias1, bias2 = torch.randn(8, w13.shape[1]), torch.randn(8, 48)
    hidden, logits = tokens()
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for rank in range(tp_size):
        layer = vllm.FusedMoE(
            **SIZES,
            activation=activation,
            has_bias=True,
            prefix=f"tp{gated}{tp_size}.{rank}.experts",
            expert_mapping=MAPPING,
            moe_parallel_config=vllm.FusedMoEParallelConfig(tp_size=tp_size, tp_rank=rank),
        )
        layer.load_weights(found.items())
        for expert in range(8):
            halves = bias1[expert].chunk(2) if gated else (bias1[expert],)
            for shard, half in zip(("w1", "w3")[: len(halves)], halves, strict=True):
                layer.weight_loader(layer.w13_bias, half, "w13_bias", shard, expert)
            layer.weight_loader(layer.w2_bias, bias2[expert], "w2_bias", "w2", expert)
        assert layer.intermediate_size_per_partition == 40 // tp_size
        total += layer(hidden, logits).double()
    expected = experts_reference(
        hidden, w13, w2, *plain_topk(logits, 2, True), activation, bias1, bias2
    )
    check(total, expected, 1e-5)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_expert_parallel_ranks_sum_to_the_whole(strategy):
    found, w13, w2 = mixtral("x", seeded(5))
    hidden, logits = tokens()
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for rank in range(3):
        layer = vllm.FusedMoE(
            **SIZES,
            num_expert_group=2,
            prefix=f"ep{strategy}.{rank}.experts",
            expert_mapping=MAPPING,
            expert_placement_strategy=strategy,
            moe_parallel_config=vllm.FusedMoEParallelConfig(ep_size=3, ep_rank=rank, use_ep=True),
        )
        assert layer.w13_weight.shape[0] == layer.local_num_experts == (3 if rank < 2 else 2)
        layer.load_weights(found.items())
        held = [e for e in range(8) if layer.expert_map[e] >= 0]
        assert torch.equal(layer.w13_weight, w13[held])
        success = layer.weight_loader(
            layer.w2_weight, w2[0], "w2_weight", "w2", 0, return_success=True
        )
        assert success == (0 in held)
        total += layer(hidden, logits).double()
    check(total, experts_reference(hidden, w13, w2, *plain_topk(logits, 2, True)), 1e-5)


@pytest.mark.parametrize("attribute", [{}, {"is_transposed": True}, {"shard_dim": 1}])
def test_loader_follows_the_attributes_of_a_parameter(attribute):
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=1)
    layer = vllm.FusedMoE(**SIZES, moe_parallel_config=split)
    flipped = bool(attribute)
    whole = torch.randn(48, 40) if flipped else torch.randn(40, 48)
    shape = (8, 48, 40) if flipped else (8, 40, 48)
    param = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    for name, value in attribute.items():
        setattr(param, name, value)
    layer.weight_loader(param, whole, "w13_weight", "w3", 2)
    part = whole[:, 20:] if flipped else whole[20:]
    loaded = param[2][:, 20:] if flipped else param[2][20:]
    assert torch.equal(loaded, part)
    assert torch.count_nonzero(param) == torch.count_nonzero(part)


def test_loader_takes_all_experts_at_once():
    layer = filled()
    stack = torch.randn(8, 40, 48)
    layer.weight_loader(layer.w13_weight, stack, "w13_weight", "w3", 0)
    assert torch.equal(layer.w13_weight[:, 40:], stack)


@pytest.mark.parametrize(
    ("name", "shape", "param_shape", "shard", "attributes"),
    [
        ("w13_weight_scale", (40, 1), (8, 40, 1), "w1", {"quant_method": "channel"}),
        ("w13_weight_scale", (40,), (8, 40, 1), "w1", {"quant_method": "channel"}),
        ("w2_weight_scale", (48, 1), (8, 48, 1), "w2", {"quant_method": "channel"}),
        ("w2_weight_scale", (48, 4), (8, 48, 2), "w2", {"quant_method": "group"}),
        (
            "w2_weight_scale",
            (48, 4),
            (8, 48, 4),
            "w2",
            {"quant_method": "group", "load_full_w2": True},
        ),
        ("w13_g_idx", (48,), (8, 48), "w1", {}),
        ("w2_g_idx", (40,), (8, 20), "w2", {}),
        ("w13_weight_shape", (2,), (8, 2), "w1", {}),
        ("w13_input_scale", (), (8,), "w1", {}),
        ("w2_weight_scale", (1,), (8,), "w2", {"quant_method": "tensor"}),
    ],
)
def test_loader_of_scales(name, shape, param_shape, shard, attributes):
    """Rank 1 of 2: what is cut, and what is whole."""
    layer = vllm.FusedMoE(
        **SIZES, moe_parallel_config=vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=1)
    )
    param = torch.nn.Parameter(torch.zeros(param_shape), requires_grad=False)
    for key, value in attributes.items():
        setattr(param, key, value)
    source = torch.randn(shape)
    layer.weight_loader(param, source, name, shard, 5)
    if shard == "w1" and "weight_scale" in name:
        expected = torch.zeros(40, 1)
        expected[:20] = source.reshape(40, 1)[20:]
    elif param_shape[1:] == (48, 2):
        expected = source[:, 2:]
    elif param_shape[1:] == (20,):
        expected = source[20:]
    else:
        expected = source.reshape(param_shape[1:])
    assert torch.equal(param[5], expected)


def test_loader_errors():
    layer = filled()
    weight = torch.zeros(40, 48)
    with pytest.raises(ConclaveValueError, match="shard_id"):
        layer.weight_loader(layer.w13_weight, weight, "w13_weight", "w4", 0)
    with pytest.raises(ConclaveValueError, match="expert_id"):
        layer.weight_loader(layer.w13_weight, weight, "w13_weight", "w1", 8)
    with pytest.raises(ConclaveValueError, match="w13_weight"):
        layer.weight_loader(layer.w13_weight, weight[:, :47], "w13_weight", "w1", 0)
    with pytest.raises(ConclaveValueError, match="reads 0 to 40"):
        layer.weight_loader(layer.w13_weight, weight[:39], "w13_weight", "w1", 0)
    with pytest.raises(ConclaveValueError, match="quant method"):
        layer.weight_loader(layer.w13_weight, weight, "w13_weight_scale", "w1", 0)
    assert layer.weight_loader(layer.w13_weight, weight, "other", "w1", 0, True) is False
    assert layer.weight_loader(layer.w13_weight, weight, "w13_weight", "w1", 0) is None
    plain = filled(activation="silu_no_mul")
    with pytest.raises(ConclaveValueError, match="no gate"):
        plain.weight_loader(plain.w13_weight, weight, "w13_weight", "w3", 0)
    assert layer.weight_loader.supports_moe_loading


FP8_CONFIGS = {
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "channel": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                "input_activations": {"dynamic": True, "strategy": "token"},
            }
        },
    },
}


@pytest.mark.parametrize("kind", FP8_CONFIGS)
def test_fp8_layers_load_and_run(kind):
    _, w1, w2, *_ = random_case(4, 1, 128, 128, 4, 2, torch.float32)
    layer = vllm.FusedMoE(
        4,
        2,
        128,
        128,
        quant_config=FP8_CONFIGS[kind],
        prefix=f"fp8{kind}.0.experts",
        expert_mapping=vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 4),
    )
    suffix = "weight_scale_inv" if kind == "block" else "weight_scale"
    parts = {"w1": w1[:, :128], "w3": w1[:, 128:], "w2": w2}
    exact, tensors = {}, {}
    for name, part in parts.items():
        codes, scales, exact[name] = quantise_weights(part, kind)
        for expert in range(4):
            tensors[f"{expert}.{name}.weight"] = codes[expert]
            tensors[f"{expert}.{name}.{suffix}"] = scales[expert]
    assert len(layer.load_weights(tensors.items())) == 24
    hidden, logits = torch.randn(9, 128), torch.randn(9, 4)
    group = 128
    w13 = torch.cat([exact["w1"], exact["w3"]], 1)
    case = (hidden, w13, exact["w2"], *plain_topk(logits, 2, True))
    out = layer(hidden, logits)
    assert worst_quantised_error(out, *case, quantise=lambda r: fp8_rows(r, group)) <= HALF_BAR


def test_ignored_layers_are_plain():
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}
    layer = filled(quant_config=config, prefix="model.layers.0.experts")
    assert layer.w13_weight.dtype == torch.float32
    assert not hasattr(layer, "w13_weight_scale")


# Replicas and moving experts about.


def test_expert_weights_are_views():
    layer = filled(has_bias=True)
    views = layer.get_expert_weights()
    assert [tuple(v.shape) for v in views] == [(8, 80 * 48), (8, 48 * 40), (8, 80), (8, 48)]
    hidden, logits = tokens()
    layer(hidden, logits)
    for view in views:
        view[[0, 1]] = view[[1, 0]]  # as a balancer swaps two experts
    routing = plain_topk(logits, 2, True)
    more = {"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
    check(layer(hidden, logits), reference(layer, hidden, *routing, **more))


def test_replicas_compute_the_same_and_are_counted():
    torch.manual_seed(0)
    logical = filled()
    mapping = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 8, 4)
    layer = vllm.FusedMoE(
        **SIZES,
        enable_eplb=True,
        num_redundant_experts=4,
        prefix="eplb.0.experts",
        expert_mapping=mapping,
    )
    tensors = {}
    for expert in range(8):
        tensors[f"{expert}.w1.weight"] = logical.w13_weight[expert, :40]
        tensors[f"{expert}.w3.weight"] = logical.w13_weight[expert, 40:]
        tensors[f"{expert}.w2.weight"] = logical.w2_weight[expert]
    assert len(layer.load_weights(tensors.items())) == 36
    hidden, logits = tokens(count=50)
    with pytest.raises(ConclaveValueError, match="set_eplb_state"):
        layer(hidden, logits)
    load = torch.zeros(2, 12, dtype=torch.int32)
    table = torch.full((2, 8, 2), -1)
    table[:, :, 0] = torch.arange(8)
    table[:, :4, 1] = torch.arange(8, 12)
    counts = torch.ones(2, 8, dtype=torch.int64)
    counts[:, :4] = 2
    layer.set_eplb_state(1, load, table, counts)
    out = layer(hidden, logits)
    assert torch.equal(out, logical(hidden, logits))
    assert load[0].sum() == 0 and load[1].sum() == 100
    ids = plain_topk(logits, 2, True)[1]
    for expert in range(4):
        used = int((ids == expert).sum())
        assert load[1, expert] + load[1, 8 + expert] == used


def test_update_expert_map():
    split = vllm.FusedMoEParallelConfig(ep_size=4, ep_rank=1, use_ep=True)
    layer = vllm.FusedMoE(**SIZES, moe_parallel_config=split)
    assert layer.expert_map.tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]
    layer.update_expert_map(vllm.FusedMoEParallelConfig(ep_size=2, ep_rank=1, use_ep=True))
    assert layer.expert_map.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3]
    assert layer.local_num_experts == 4 and layer.ep_size == 2
    with pytest.raises(ConclaveValueError, match="expert_map"):
        filled().update_expert_map()
    with pytest.raises(ConclaveValueError, match="even distribution"):
        vllm.FusedMoE(**{**SIZES, "num_experts": 7}, moe_parallel_config=split, enable_eplb=True)


def test_sums_over_ranks_need_a_group():
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=0)
    layer = filled(moe_parallel_config=split, reduce_results=True)
    with pytest.raises(ConclaveUnsupportedError, match="reduce_results"):
        layer(*tokens())
    alone = filled(reduce_results=True)
    rows = torch.randn(3, 48)
    assert alone.maybe_all_reduce_tensor_model_parallel(rows) is rows
    assert not alone.must_reduce_shared_expert_outputs()


def test_state_dict_round_trip():
    one, other = filled(seed=1), filled(seed=2)
    hidden, logits = tokens()
    other(hidden, logits)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(hidden, logits), other(hidden, logits))
    assert set(one.state_dict()) == {"w13_weight", "w2_weight"}


def test_sums_over_ranks_by_the_default_group(monkeypatch):
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=0)
    alone = filled(moe_parallel_config=split)
    layer = filled(moe_parallel_config=split, reduce_results=True)
    assert torch.equal(layer(*tokens()), 2 * alone(*tokens()))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-5), (torch.float16, HALF_BAR), (torch.bfloat16, 2e-2)],
    ids=["f32", "f16", "bf16"],
)
def test_mixtral_block_of_transformers(dtype, limit):
    """vLLM's test: 64 tokens through the model's own block, in the block's own arithmetic."""
    mixtral = pytest.importorskip(
        "transformers.models.mixtral.modeling_mixtral", reason="transformers is not installed"
    )
    from transformers import MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.2)
    block = block.to(dtype).eval()
    stacked = dict(block.named_parameters())
    if "experts.gate_up_proj" not in stacked:
        pytest.skip("this transformers keeps experts apart")
    layer = filled(params_dtype=dtype)
    layer.weight_loader(
        layer.w13_weight, stacked["experts.gate_up_proj"][:, :40], "weight", "w1", 0
    )
    layer.weight_loader(
        layer.w13_weight, stacked["experts.gate_up_proj"][:, 40:], "weight", "w3", 0
    )
    layer.weight_loader(layer.w2_weight, stacked["experts.down_proj"], "weight", "w2", 0)
    hidden = torch.randn(1, 64, 48).to(dtype)
    with torch.no_grad():
        logits = hidden[0] @ stacked["gate.weight"].T
        expected = block(hidden)
        expected = expected[0] if isinstance(expected, tuple) else expected
        out = layer(hidden[0], logits)
    assert worst_error(out, expected.reshape(64, 48).double()) <= limit


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_experts", 0),
        ("hidden_size", 0),
        ("intermediate_size", -1),
        ("params_dtype", torch.int8),
        ("swiglu_limit", float("nan")),
    ],
)
def test_sizes_and_types_that_cannot_be_are_refused_at_once(argument, value):
    given = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 6}
    with pytest.raises((ConclaveValueError, ConclaveTypeError), match=f"{argument}: "):
        vllm.FusedMoE(**{**given, argument: value})


def test_a_limit_that_the_activation_lacks_is_refused_at_once():
    with pytest.raises(ConclaveValueError, match="relu2_no_mul has no parameter limit"):
        vllm.FusedMoE(4, 2, 8, 6, activation="relu2_no_mul", swiglu_limit=7.0)


EPLB = {
    "load": torch.zeros(2, 5, dtype=torch.int32),
    "slots": torch.tensor([[[0, 4], [1, -1], [2, -1], [3, -1]]] * 2),
    "counts": torch.tensor([[2, 1, 1, 1]] * 2),
}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"load": torch.zeros(2, 4, dtype=torch.int32)}, r"expert_load_view: .*5"),
        ({"load": torch.zeros(2, 5)}, r"expert_load_view: .*integers"),
        ({"load": None}, r"expert_load_view: .*NoneType"),
        ({"slots": EPLB["slots"][:, :3]}, r"logical_to_physical_map: .*4, replicas"),
        ({"slots": EPLB["slots"][0]}, "logical_to_physical_map: "),
        ({"counts": EPLB["counts"][:, :3]}, "logical_replica_count: "),
        ({"counts": EPLB["counts"] + 1}, r"logical_replica_count: .*at most 2.* found 3"),
        ({"row": 2}, r"moe_layer_idx: .*0 to 1"),
        ({"row": -1}, r"moe_layer_idx: .*0 to 1"),
    ],
)
def test_a_balancers_tensors_of_other_experts_are_refused(given, error):
    """An expert that the map lacks would drop out of the sums without a word."""
    if EPLB["load"].device.type != torch.empty(0).device.type:
        pytest.skip("numbers on a GPU are not waited for")
    layer = vllm.FusedMoE(4, 2, 8, 6, enable_eplb=True, num_redundant_experts=1)
    rows = {"row": 0, **EPLB, **given}
    with pytest.raises((ConclaveValueError, ConclaveTypeError), match=error):
        layer.set_eplb_state(rows["row"], rows["load"], rows["slots"], rows["counts"])


@pytest.mark.parametrize("weight", [None, "text", [[1.0], [1.0, 2.0]]])
def test_what_is_no_tensor_is_not_loaded(weight):
    layer = filled()
    with pytest.raises(ConclaveTypeError, match="loaded_weight: expected a tensor"):
        layer.weight_loader(layer.w13_weight, weight, "w13_weight", "w1", 0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (None, 1.5, "8", [8], True)) for name in SIZES),
        *((name, (1.5, "1", [1])) for name in ("num_expert_group", "topk_group", "tp_size")),
        ("num_redundant_experts", (1.5, "1", [1])),
        *((name, ("1", [1], True)) for name in ("swiglu_limit", "routed_scaling_factor")),
        ("scoring_func", (None, 3, ["softmax"])),
        ("prefix", (None, 3, ["layer"])),
        ("activation", (None, 3, ["silu"])),
        ("params_dtype", (3, "float32", torch.int8)),
    ],
)
def test_wrong_types_are_errors_by_name(name, values):
    for value in values:
        with pytest.raises(Error, match=rf"^{name}\b"):
            vllm.FusedMoE(**{**SIZES, name: value})
