"""conclave.vllm.FusedMoE: tensors of all experts, and of gate and up, in one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveValueError  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference  # noqa: E402

E, H, N = 6, 96, 64
FP8 = {"type": "float", "num_bits": 8}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {**FP8, "strategy": "channel"},
            "input_activations": {"dynamic": True},
        }
    },
}
BLOCK = {"quant_method": "fp8", "weight_block_size": [32, 32]}
SPLITS = {
    "one": {},
    "tp": {"tp_size": 2, "tp_rank": 1},
    "ep": {"ep_size": 4, "ep_rank": 1, "use_ep": True},
    "round robin": {"ep_size": 2, "ep_rank": 1, "use_ep": True},
}


def layer_of(split="one", members=("gate_proj", "down_proj", "up_proj"), **more):
    redundant = more.get("num_redundant_experts", 0)
    mapping = vllm.FusedMoE.make_expert_params_mapping(None, *members, E, redundant)
    placed = (
        {
            "expert_placement_strategy": "round_robin",
            "num_expert_group": 2,
            "topk_group": 1,
            "use_grouped_topk": True,
        }
        if split == "round robin"
        else {}
    )
    return vllm.FusedMoE(
        E, 2, H, N,
        expert_mapping=mapping,
        moe_parallel_config=vllm.FusedMoEParallelConfig(**SPLITS[split]),
        **placed, **more,
    )  # fmt: skip


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed + sum(shape)))


def matrices(quant):
    """Tensors of gate, up and down of all experts by what stands behind their name."""
    found = {}
    for name, rows, cols in (("gate", N, H), ("up", N, H), ("down", H, N)):
        seed = len(name)
        values = random(E, rows, cols, seed=seed)
        if quant is None:
            found[name] = {"weight": values, "bias": random(E, rows, seed=seed)}
        elif quant is CHANNEL:
            scale = random(E, rows, 1, seed=seed).abs()
            found[name] = {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}
        else:
            scale = random(E, rows // 32, cols // 32, seed=seed).abs()
            found[name] = {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    return found


def filled_one_by_one(layer, found):
    for name, shard in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for kind, stack in found[name].items():
            key = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
            for expert in range(layer.global_num_experts):
                layer.weight_loader(getattr(layer, key), stack[expert % E], key, shard, expert)
    return dict(layer.named_parameters())


def same(layer, wanted):
    for name, param in layer.named_parameters():
        assert torch.equal(param.view(torch.uint8), wanted[name].view(torch.uint8)), name
        assert param.float().abs().sum() > 0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("quant", [None, CHANNEL, BLOCK], ids=["values", "channel", "block"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_stacks_of_all_experts(split, quant, turned):
    found, more = matrices(quant), {"quant_config": quant, "has_bias": quant is None}
    wanted = filled_one_by_one(layer_of(split, **more), found)
    layer = layer_of(split, **more)
    layer.is_fused_checkpoint_transposed = turned

    def stored(kind, tensor):
        by_layout = kind in ("weight", "weight_scale_inv")
        return tensor.transpose(1, 2).contiguous() if turned and by_layout else tensor

    tensors = {}
    for kind in found["gate"]:
        both = torch.cat([found["gate"][kind], found["up"][kind]], 1)
        tail = "" if kind == "weight" else f"_{kind}"
        tensors[f"gate_up_proj{tail}"] = stored(kind, both)
        tensors[f"experts.down_proj.{kind}"] = stored(kind, found["down"][kind])
    taken = layer.load_weights(tensors.items())
    assert sorted(taken) == sorted(wanted)
    same(layer, wanted)


@pytest.mark.parametrize("split", ["one", "ep"])
@pytest.mark.parametrize("fused", ["gate_up_proj", "w13"])
def test_gate_and_up_of_one_expert_in_one(split, fused):
    found = matrices(CHANNEL)
    members = ("w1", "w2", "w3")
    wanted = filled_one_by_one(layer_of(split, members, quant_config=CHANNEL), found)
    layer = layer_of(split, members, quant_config=CHANNEL)
    for expert in range(E):
        pairs = {
            f"{expert}.{fused}.{kind}": torch.cat([found["gate"][kind], found["up"][kind]], 1)[
                expert
            ]
            for kind in found["gate"]
        }
        pairs |= {
            f"experts.{expert}.w2.{kind}": found["down"][kind][expert] for kind in found["down"]
        }
        taken = layer.load_weights(pairs.items())
        assert bool(taken) == layer._experts.is_local_expert(expert)
    same(layer, wanted)


def test_stacks_of_one_matrix_through_load_weights_and_the_loader():
    found = matrices(None)
    wanted = filled_one_by_one(layer_of("ep", has_bias=True), found)
    layer = layer_of("ep", has_bias=True)
    for name, shard in (("gate_proj", "w1"), ("up_proj", "w3")):
        of = found[name.removesuffix("_proj")]
        assert layer.load_weights([(f"{name}.weight", of["weight"])]) == ["w13_weight"]
        assert layer.weight_loader(layer.w13_bias, of["bias"], "w13_bias", shard, 0, True)
    layer.weight_loader(layer.w2_weight, found["down"]["weight"], "w2_weight", "w2", 5)
    layer.weight_loader(layer.w2_bias, found["down"]["bias"], "w2_bias", "w2", 5)
    same(layer, wanted)


def test_a_stack_of_this_ranks_experts_alone():
    found = matrices(None)
    layer, wanted = layer_of("ep"), layer_of("ep")
    filled_one_by_one(wanted, {name: {"weight": of["weight"]} for name, of in found.items()})
    own = layer._experts.get_local_expert_ids()
    assert len(own) < E
    for name, shard in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        key = "w2_weight" if shard == "w2" else "w13_weight"
        layer.weight_loader(getattr(layer, key), found[name]["weight"][own], key, shard, 0)
    same(layer, dict(wanted.named_parameters()))


def test_copies_get_their_experts_weights():
    found = {name: {"weight": of["weight"]} for name, of in matrices(None).items()}
    more = {"enable_eplb": True, "num_redundant_experts": 2}
    wanted = filled_one_by_one(layer_of(**more), found)
    for whole in (True, False):
        layer = layer_of(**more)
        both = torch.cat([found["gate"]["weight"], found["up"]["weight"]], 1)
        if whole:
            layer.load_weights([("gate_up_proj", both), ("down_proj", found["down"]["weight"])])
        else:
            for expert in range(E):
                layer.load_weights(
                    [
                        (f"{expert}.gate_up_proj.weight", both[expert]),
                        (f"experts.{expert}.down_proj.weight", found["down"]["weight"][expert]),
                    ]
                )
        same(layer, wanted)
        assert torch.equal(layer.w13_weight[7], layer.w13_weight[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_gate_and_up_in_turn_stay_in_turn(ranks):
    both, down = random(E, 2 * N, H) / 16, random(E, H, N) / 8
    bias = random(E, 2 * N)
    hidden, logits = random(5, H), random(5, E)
    total = 0
    for rank in range(ranks):
        split = vllm.FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank)
        mapping = vllm.FusedMoE.make_expert_params_mapping(
            None, "gate_proj", "down_proj", "up_proj", E
        )
        layer = vllm.FusedMoE(
            E, 2, H, N, activation="swigluoai", has_bias=True, moe_parallel_config=split,
            expert_mapping=mapping,
        )  # fmt: skip
        names = {"gate_up_proj": both, "gate_up_proj_bias": bias, "down_proj": down}
        layer.load_weights(names.items())
        total = total + layer(hidden, logits).double()
    weights, ids = layer.select_experts(hidden, logits)
    expected = experts_reference(hidden, both, down, weights, ids, "swigluoai", w1_bias=bias)
    assert worst_error(total, expected) <= 4 * FLOAT32_BAR


def test_the_padded_stacks_of_gpt_oss_on_an_expert_parallel_rank():
    def of(split):
        return vllm.FusedMoE(
            E, 2, 64, 96, quant_config={"quant_method": "mxfp4"}, activation="swigluoai",
            has_bias=True, moe_parallel_config=vllm.FusedMoEParallelConfig(**SPLITS[split]),
        )  # fmt: skip

    layer, whole = of("ep"), of("one")
    generator = seeded(1)
    for key, shape in (("w13_weight", (E, 128, 2, 16)), ("w13_weight_scale", (E, 128, 2)),
                       ("w2_weight", (E, 64, 2, 16)), ("w13_bias", (E, 128))):  # fmt: skip
        source = torch.randint(1, 9, shape, generator=generator, dtype=torch.uint8)
        source = source.float() if "bias" in key else source
        own = layer._experts.get_local_expert_ids()
        for made in (layer, whole):
            assert made.weight_loader(getattr(made, key), source, key, None, None, True)
        assert torch.equal(getattr(layer, key), getattr(whole, key)[own])
        assert getattr(layer, key).any()


def test_what_belongs_to_others_or_does_not_fit_is_named():
    layer = layer_of("ep", prefix="model.layers.30.mlp.experts")
    both = torch.ones(E, 2 * N, H)
    with pytest.raises(ConclaveValueError, match="none of the names"):
        layer.load_weights([("shared_experts.gate_up_proj", both)])
    for name, tensor, text in (
        ("gate_up_proj", both[:4], "expected a tensor of 6 experts, or of this rank's 2, found 4"),
        ("gate_up_proj", both[:, :-1], "rows of gate and as many of up"),
        ("gate_up_proj", both.transpose(1, 2), "w13_weight"),
        ("gate_up_proj_bias", both[..., 0], "goes to w13_bias"),
        ("6.gate_up_proj.weight", both[0], "expert 6, the layer has 6"),
        ("down_proj", both, "w2_weight: w2"),
    ):
        with pytest.raises(ConclaveValueError, match=text):
            layer.load_weights([(name, tensor)])
    assert not layer.w13_weight.any() and not layer.w2_weight.any()
