"""conclave.vllm.FusedMoE: what engines ask of a layer, parameters of activations, any width."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveValueError,
    Error,
)
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}

# Every public attribute and property of the class of that name in vLLM's files.
PUBLIC = (
    *("activation", "aiter_fmoe_shared_expert_enabled", "apply_router_weight_on_input"),
    *("custom_routing_function", "e_score_correction_bias", "enable_eplb", "ep_rank", "ep_size"),
    *("eplb_state", "expert_map", "expert_mapping", "expert_mask", "expert_placement_strategy"),
    *("gate", "global_num_experts", "hidden_size", "intermediate_size_per_partition"),
    *("is_internal_router", "is_sequence_parallel", "layer_id", "layer_name", "local_num_experts"),
    *("logical_num_experts", "moe_config", "moe_parallel_config", "moe_quant_config"),
    *("num_expert_group", "num_fused_shared_experts", "params_dtype", "quant_config"),
    *("quant_method", "reduce_results", "renormalize", "rocm_aiter_fmoe_enabled"),
    *("routed_scaling_factor", "router", "routing_method_type", "runner", "scoring_func"),
    *("shared_experts", "sp_size", "top_k", "topk_group", "tp_rank", "tp_size", "use_ep"),
    *("use_grouped_topk", "use_overlapped", "vllm_config"),
)


def tokens(count=11):
    generator = seeded(1)
    return torch.randn(count, 48, generator=generator), torch.randn(count, 8, generator=generator)


def test_every_attribute_is_there():
    bias = torch.nn.Parameter(torch.linspace(0, 1, 8), requires_grad=False)
    mapping = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 8)
    shared = torch.nn.Identity()
    layer = vllm.FusedMoE(
        **SIZES,
        renormalize=False,
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
        shared_experts=shared,
        expert_mapping=mapping,
        prefix="attributes.7.experts",
    )
    missing = [name for name in PUBLIC if not hasattr(layer, name)]
    assert not missing
    assert (layer.renormalize, layer.use_grouped_topk) == (False, True)
    assert (layer.num_expert_group, layer.topk_group) == (4, 2)
    assert (layer.scoring_func, layer.routed_scaling_factor) == ("sigmoid", 2.5)
    assert layer.custom_routing_function is None and layer.vllm_config is None
    assert layer.e_score_correction_bias is bias and "e_score_correction_bias" not in dict(
        layer.named_parameters()
    )
    assert layer.use_overlapped and layer.shared_experts is shared is layer.runner.shared_experts
    assert not vllm.FusedMoE(**SIZES).use_overlapped
    assert layer.expert_placement_strategy == "linear" and layer.sp_size == 1
    assert layer.layer_id == 7 and layer.quant_config is None
    runner = layer.runner
    assert runner.moe_config is layer.moe_config and runner.router is layer.router
    assert runner.layer_name == "attributes.7.experts" and not runner.enable_dbo
    assert runner.gate is None and not runner.is_internal_router and runner.use_overlapped
    assert not runner.reduce_results and not runner.must_reduce_shared_expert_outputs()
    rows = torch.ones(2, 48)
    assert runner.maybe_all_reduce_tensor_model_parallel(rows) is rows
    assert runner.routed_experts is layer and layer.expert_map_manager.local_num_experts == 8


def test_tables_of_round_robin_are_buffers():
    def config(rank, backend="deepep_low_latency"):
        return vllm.FusedMoEParallelConfig(
            ep_size=3, ep_rank=rank, use_ep=True, dp_size=3, dp_rank=rank, all2all_backend=backend
        )

    placed = {"num_expert_group": 2, "expert_placement_strategy": "round_robin"}
    layer = vllm.FusedMoE(**SIZES, moe_parallel_config=config(1), **placed)
    tables = layer._maybe_init_expert_routing_tables()
    assert torch.equal(tables[0], layer.expert_global_to_physical)
    assert torch.equal(tables[0][tables[1]], torch.arange(8))
    assert layer.expert_local_to_global.tolist() == [1, 4, 7]
    layer.update_expert_map(config(2))
    assert layer.expert_local_to_global.tolist() == [2, 5]  # not those of before
    assert set(layer.state_dict()) == {"w13_weight", "w2_weight"}
    linear = vllm.FusedMoE(**SIZES, moe_parallel_config=config(1))
    assert linear._maybe_init_expert_routing_tables() is None
    assert vllm.FusedMoE(**SIZES)._maybe_init_expert_routing_tables() is None


def test_the_configuration_has_the_words_of_both_versions():
    layer = vllm.FusedMoE(
        **SIZES,
        activation="swigluoai",
        swiglu_alpha=1.5,
        swiglu_beta=0.5,
        swiglu_limit=6.0,
        params_dtype=torch.bfloat16,
    )
    config = layer.moe_config
    assert (config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit) == (1.5, 0.5, 6.0)
    assert config.router_logits_dtype is config.in_dtype is torch.bfloat16
    split = vllm.FusedMoEParallelConfig(tp_size=2)
    odd = vllm.FusedMoEConfig(
        8, 2, 48, 8, split, torch.float32, intermediate_size=41, activation="situ",
        activation_situ_beta=3.0, activation_situ_linear_beta=20.0,
        router_logits_dtype=torch.float16,
    )  # fmt: skip
    assert odd.intermediate_size_per_partition == 21
    assert odd.router_logits_dtype is torch.float16
    manager = vllm.ExpertMapManager(
        max_num_batched_tokens=1, top_k=2, global_num_experts=8, num_redundant_experts=0,
        num_expert_group=None, moe_parallel_config=split, placement_strategy="linear",
        enable_eplb=False, num_fused_shared_experts=0, rocm_aiter_enabled=False,
    )  # fmt: skip
    assert manager.local_num_experts == 8


# Parameters of activations.


def fill(layer, inner=40):
    generator = seeded(2)
    layer.w13_weight.data.copy_(torch.randn(layer.w13_weight.shape, generator=generator) / 2)
    layer.w2_weight.data.copy_(torch.randn(layer.w2_weight.shape, generator=generator) / 4)
    return layer


def by_formula(layer, hidden, logits, formula):
    """The layer's sum in float64, with an activation of gate and up."""
    weights, ids = layer.select_experts(hidden, logits)
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    w13, w2 = layer.w13_weight.double(), layer.w2_weight.double()
    for slot in range(ids.shape[1]):
        chosen = ids[:, slot].long()
        rows = torch.einsum("th,tnh->tn", hidden.double(), w13[chosen])
        if layer.activation.is_interleaved:
            gate, up = rows[:, ::2], rows[:, 1::2]
        else:
            gate, up = rows.chunk(2, 1)
        rows = torch.einsum("tn,thn->th", formula(gate, up), w2[chosen])
        out += weights[:, slot, None].double() * rows
    return out


def oai(alpha=1.702, beta=1.0, limit=7.0):
    def formula(gate, up):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return formula


def situ(beta=4.0, linear_beta=25.0):
    def formula(gate, up):
        if linear_beta:
            up = linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up

    return formula


@pytest.mark.parametrize(
    ("arguments", "formula"),
    [
        ({"activation": "swigluoai"}, oai()),
        (
            {
                "activation": "swigluoai",
                "swiglu_alpha": 1.2,
                "swiglu_beta": 0.25,
                "swiglu_limit": 1.5,
            },
            oai(1.2, 0.25, 1.5),
        ),
        ({"activation": "swigluoai_uninterleave", "swiglu_beta": 0.5}, oai(beta=0.5)),
        ({"activation": "situ"}, situ()),
        (
            {
                "activation": "situ",
                "activation_situ_beta": 2.0,
                "activation_situ_linear_beta": 3.0,
            },
            situ(2.0, 3.0),
        ),
        ({"activation": "situ", "activation_situ_linear_beta": 0.0}, situ(linear_beta=0.0)),
    ],
)
def test_parameters_of_activations_are_used(arguments, formula):
    layer = fill(vllm.FusedMoE(**SIZES, **arguments))
    hidden, logits = tokens()
    expected = by_formula(layer, hidden, logits, formula)
    assert worst_error(layer(hidden, logits), expected) <= FLOAT32_BAR
    other = fill(vllm.FusedMoEFactory(**SIZES, **arguments))
    assert worst_error(other(hidden, logits), expected) <= FLOAT32_BAR


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"swiglu_alpha": 1.5}, "alpha"),
        ({"activation_situ_beta": 1.5}, "activation_situ_beta"),
        ({"activation_situ_linear_beta": 1.5}, "linear_beta"),
        ({"activation": "situ", "swiglu_beta": 1.5}, "swiglu_beta"),
        ({"activation": "situ", "swiglu_alpha": 1.5}, "alpha"),
        ({"activation": "gelu", "swiglu_beta": 0.5}, "beta"),
        ({"activation": "swigluoai", "swiglu_alpha": float("nan")}, "finite"),
        ({"shared_experts_stream_token_threshold": -1}, "threshold"),
    ],
)
def test_parameters_that_do_not_go_are_refused(arguments, name):
    with pytest.raises(ConclaveValueError, match=name):
        vllm.FusedMoE(**SIZES, **arguments)


def test_a_threshold_of_streams_changes_nothing():
    hidden, logits = tokens()
    layer = vllm.FusedMoE(**SIZES, shared_experts_stream_token_threshold=256)
    assert layer.shared_experts_stream_token_threshold == 256
    assert torch.equal(fill(layer)(hidden, logits), fill(vllm.FusedMoE(**SIZES))(hidden, logits))


# Any width over ranks.


def experts_of(inner, gated=True):
    generator = seeded(6)
    found = {}
    for expert in range(8):
        found[expert, "w1"] = torch.randn(inner, 48, generator=generator) / 4
        if gated:
            found[expert, "w3"] = torch.randn(inner, 48, generator=generator) / 4
        found[expert, "w2"] = torch.randn(48, inner, generator=generator) / 4
    return found


def loaded(tensors, inner, rank=0, ranks=1, **arguments):
    split = vllm.FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank)
    layer = vllm.FusedMoE(
        **{**SIZES, "intermediate_size": inner, **arguments}, moe_parallel_config=split
    )
    bias = torch.linspace(-1, 1, inner)
    for (expert, shard), tensor in tensors.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        layer.weight_loader(getattr(layer, name), tensor, name, shard, expert)
        if arguments.get("has_bias"):
            half = bias * (expert + 1) if shard != "w2" else torch.full((48,), 0.1 * expert)
            name = "w2_bias" if shard == "w2" else "w13_bias"
            layer.weight_loader(getattr(layer, name), half, name, shard, expert)
    return layer


@pytest.mark.parametrize(("inner", "ranks"), [(41, 2), (41, 4), (5, 4), (3, 8), (40, 3)])
@pytest.mark.parametrize("activation", ["silu", "situ", "relu2_no_mul"])
def test_slices_of_any_width_add_up(inner, ranks, activation):
    more = {"activation": activation, "has_bias": True}
    tensors = experts_of(inner, not activation.endswith("_no_mul"))
    hidden, logits = tokens()
    whole = loaded(tensors, inner, **more)(hidden, logits)
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for rank in range(ranks):
        layer = loaded(tensors, inner, rank, ranks, **more)
        columns = inner * (rank + 1) // ranks - inner * rank // ranks
        assert layer.intermediate_size_per_partition == max(columns, 1)
        assert layer.moe_config.intermediate_size == inner
        total += layer(hidden, logits).double()
    assert worst_error(total, whole.double()) <= 1e-5


def test_ranks_of_the_default_group(monkeypatch):
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    layer = vllm.FusedMoE(**SIZES, tp_size=2)
    assert (layer.tp_size, layer.tp_rank, layer.w2_weight.shape[2]) == (2, 1, 20)
    for wrong in ({"tp_size": 4}, {"tp_size": 2, "dp_size": 2}, {"dp_size": 2}):
        with pytest.raises(Error, match="_size"):
            vllm.FusedMoE(**SIZES, **wrong)
