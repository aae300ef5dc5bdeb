"""conclave.vllm.install: RoutedExperts, its mapping and loaders, and what its owners assign."""

from __future__ import annotations

import logging
import types

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError  # noqa: E402
from conclave.vllm.engine.calls import moe_permute  # noqa: E402
from conclave.vllm.engine.mapped_loading import published_mapping  # noqa: E402
from conclave.vllm.engine.routed_experts import RoutedExperts  # noqa: E402
from support.devices import seeded  # noqa: E402

E, H, N = 4, 8, 6
NAMES = ("gate_proj", "down_proj", "up_proj")


class Owner(torch.nn.Module):
    """A module of a program's own, which keeps what its parameters are given."""

    layer_name = "model.layers.0.experts"

    def __init__(self, rows, suffix="weight", kind=None, gated=True, turned=False):
        super().__init__()
        self.moe_config = types.SimpleNamespace(is_act_and_mul=gated)
        self.get_expert_mapping = lambda include_fused: rows
        self.is_fused_checkpoint_transposed = turned
        self.found = {}
        for base in ("w13", "w2"):
            param = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            param.quant_method, param.weight_loader = kind, self.keep
            setattr(self, f"{base}_{suffix}", param)

    def keep(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success):
        self.found[weight_name, shard_id, expert_id] = loaded_weight
        return return_success


def load(owner, *weights):
    return RoutedExperts.load_weights(owner, weights)


def rows(*names, **more):
    return published_mapping(*(names or NAMES), E, 0, "", include_fused=True, **more)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def test_rows_name_stacks_first_then_each_expert():
    found = published_mapping("w1", "w2", "w3", 2, 1, "routed_experts", include_fused=True)
    owner = "experts.routed_experts."
    assert found[:3] == [
        (f"{owner}w13_weight", "experts.w13", 0, "w1"),
        (f"{owner}w13_weight", "experts.w13", 1, "w3"),
        (f"{owner}w2_weight", "experts.w2", 0, "w2"),
    ]
    assert found[3:9:2] == [(f"{owner}w13_", f"experts.{i}.w13.", p, "w1") for p, i in
                            enumerate((0, 1, 0))]  # fmt: skip
    assert found[-1] == (f"{owner}w13_", "experts.0.w3.", 2, "w3")
    assert published_mapping("w1", "w2", "w3", 2) == [
        row for row in found[9:] if row[2] < 2
    ]  # fmt: skip
    base = published_mapping("w1", "w2", None, 1, 0, "", "base_layer.", "base_layer.")
    assert base[0] == ("experts.base_layer.w13_", "experts.0.w1.base_layer.", 0, "w1")
    assert len(base) == 2
    with pytest.raises(ConclaveValueError, match="ckpt_gate_proj_name"):
        published_mapping("", "w2", "w3", 1)


def test_names_without_a_joined_one_are_logged(caplog):
    with caplog.at_level(logging.WARNING, "conclave.vllm"):
        assert rows("fc1", "fc2", "fc3")[0][1] == "experts.0.fc1."
    assert "fc1, fc3" in caplog.text


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("suffix", "kind"), [("weight", None), ("weight_scale", "channel"), ("weight_scale", "block")]
)
def test_stacks_are_taken_apart(suffix, kind, turned):
    whole = numbers(E, 2 * N, H)
    stored = whole.mT if turned and kind != "channel" else whole
    owner = Owner(rows(), suffix, kind, turned=turned)
    taken = load(owner, (f"gate_up_proj{suffix[6:]}", stored))
    assert taken == [f"w13_{suffix}"] * 2 * E
    for expert in range(E):
        assert owner.found[f"w13_{suffix}", "w1", expert].equal(whole[expert, :N])
        assert owner.found[f"w13_{suffix}", "w3", expert].equal(whole[expert, N:])


def test_single_experts_and_joined_ones():
    owner = Owner(rows())
    load(owner, ("2.down_proj.weight", numbers(H, N)), ("1.gate_up_proj.weight", numbers(2 * N, H)))
    assert owner.found["w2_weight", "w2", 2].equal(numbers(H, N))
    assert owner.found["w13_weight", "w3", 1].equal(numbers(2 * N, H)[N:])
    assert len(owner.found) == 3
    # Codes in blocks have three axes and are one expert's all the same.
    load(owner, ("3.down_proj.weight", numbers(H, 2, 4)))
    assert owner.found["w2_weight", "w2", 3].shape == (H, 2, 4)
    assert (
        load(owner, ("02.down_proj.weight", numbers(H, N)), ("9.up_proj.weight", numbers(1))) == []
    )


def test_experts_without_a_gate_and_biases():
    owner = Owner(rows("up_proj", "down_proj", None, is_gated=False), gated=False)
    load(owner, ("up_proj", numbers(E, N, H)))
    assert owner.found["w13_weight", "w1", 3].equal(numbers(E, N, H)[3])
    assert load(owner, ("0.up_proj.bias", torch.zeros(N))) == []
    for name, parameter in (("0.up_proj.scale", "w13_scale"), ("up_proj_bias", "w13_weight_bias")):
        with pytest.raises(AttributeError, match=parameter):
            load(owner, (name, torch.zeros(1)))


def test_a_layer_of_ours_loads_as_before():
    layer = RoutedExperts(E, 2, H, N, expert_mapping=vllm.FusedMoE.make_expert_params_mapping(
        None, *NAMES, E))  # fmt: skip
    w13 = torch.randn(E, 2 * N, H, generator=seeded(1))
    assert layer.load_weights([("gate_up_proj", w13)]) == ["w13_weight"]
    assert layer.w13_weight.equal(w13)
    mapping = layer.get_expert_mapping(include_fused=True)
    assert mapping == published_mapping(*NAMES, E, 0, "", include_fused=True)
    assert layer._quant_method is layer.quant_method


def test_padded_parameters_of_a_program():
    narrow = RoutedExperts._narrow_expert_data_for_padding
    padded, source = torch.zeros(12, 10), torch.ones(9, 7)
    assert narrow(padded, source, 0).shape == (9, 10)
    narrow(padded, source, 0, 1).copy_(source)
    assert padded[:9, :7].equal(source) and padded.sum() == source.sum()
    assert narrow(source, padded, 0, 1).shape == source.shape
    assert (
        narrow(padded, torch.tensor(1.0), 0).shape == narrow(padded, source, -1).shape == (12, 10)
    )
    assert [RoutedExperts._get_hidden_dim(*axes) for axes in ((0, 2), (1, 2), (2, 3), (0, 1))] == [
        1, 0, 1, 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not a valid data dimension"):
        RoutedExperts._get_hidden_dim(0, 3)
    assert RoutedExperts._to_scalar(torch.ones(1)).shape == ()


def test_a_split_can_be_assigned_and_is_checked_where_it_is_used():
    split = vllm.FusedMoEParallelConfig()
    split.tp_rank, split.tp_size = 1, 2
    layer = vllm.FusedMoE(E, 2, H, N, moe_parallel_config=split)
    assert layer.w2_weight.shape == (E, H, N // 2)
    split.tp_rank = 2
    assert layer.tp_rank == 1
    for made in (
        lambda: vllm.FusedMoE(E, 2, H, N, moe_parallel_config=split),
        lambda: vllm.ExpertMapManager(E, split),
    ):
        with pytest.raises(ConclaveValueError, match="tp_rank: expected 0 to 1, found 2"):
            made()


def test_a_method_leaves_shared_experts_to_the_layer():
    layer = vllm.FusedMoE(E, 2, H, N, params_dtype=torch.float32)
    for param in layer.parameters():
        param.data.normal_(generator=seeded(2))
    x, logits = torch.randn(3, H, generator=seeded(3)), torch.randn(3, E, generator=seeded(4))
    weights, ids = layer.select_experts(x, logits)
    call = {"layer": layer, "x": x, "topk_weights": weights, "topk_ids": ids}
    shared = {"shared_experts": None, "shared_experts_input": None}
    assert layer._quant_method.apply(**call, **shared).equal(layer(x, logits))
    with pytest.raises(ConclaveUnsupportedError, match="shared_experts"):
        layer._quant_method.apply(**call, shared_experts=torch.nn.Identity())


def test_rows_of_other_ranks_are_numbered_by_expert():
    ids = torch.tensor([[3, 0], [2, 1], [-1, 3], [1, 2]])
    local = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    rows_, _, first, inverse, _ = moe_permute(torch.ones(4, 2), None, ids, 4, expert_map=local)
    assert first.tolist() == [0, 2] and rows_.sum() == 4
    assert inverse.tolist() == [5, 2, 3, 0, 7, 6, 1, 4]


def test_padding_of_the_forward_is_skipped_by_groups_that_ask():
    router = vllm.create_fused_moe_router(
        2, 8, use_grouped_topk=True, num_expert_group=4, topk_group=2, skip_padding=True
    )
    plain = vllm.create_fused_moe_router(
        2, 8, use_grouped_topk=True, num_expert_group=4, topk_group=2
    )
    hidden, logits = torch.zeros(3, 16), torch.randn(3, 8, generator=seeded(4))
    weights, ids = plain.select_experts(hidden, logits)
    padding = torch.tensor([False, True, False, True])
    with vllm.install():
        from vllm.config import VllmConfig
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, VllmConfig(), is_padding=padding):
            found_weights, found = router.select_experts(hidden, logits)
            assert torch.equal(plain.select_experts(hidden, logits)[1], ids)
    assert found[1].tolist() == [-1, -1] and found_weights[1].tolist() == [0, 0]
    assert torch.equal(found[[0, 2]], ids[[0, 2]])
    assert torch.equal(found_weights[[0, 2]], weights[[0, 2]])
    assert torch.equal(router.select_experts(hidden, logits)[1], ids)


def test_experts_that_stay_keep_their_slots():
    from conclave.vllm.engine.eplb import DefaultEplbPolicy

    old = numpy.array([[0, 1, 0, 2, 3, 4, 5, 6, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    new = numpy.array([[0, 5, 4, 0, 1, 6, 2, 3, 2, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
    found = DefaultEplbPolicy.preserve_intragpu_slots(new, 2, old)
    assert found.tolist() == [[0, 1, 0, 5, 4, 3, 2, 6, 1, 2], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
    assert DefaultEplbPolicy.preserve_intragpu_slots(new, 3, old) is new


def test_names_are_those_of_one_configuration():
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "intermediate_size": 8}
    with vllm.install():
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        kept = []
        for _ in range(2):
            config = VllmConfig()
            with set_current_vllm_config(config):
                kept.append(FusedMoEFactory(**sizes, prefix="layers.0.mlp"))
                with pytest.raises(ConclaveValueError, match="Duplicate"):
                    FusedMoEFactory(**sizes, prefix="layers.0.mlp")
            found = config.compilation_config.static_forward_context
            assert found == {"layers.0.mlp": kept[-1]}
    assert "layers.0.mlp" not in vllm.static_forward_context
