"""conclave.vllm.FusedMoE: quantised parameters by configuration, and tensors that do not fit."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError  # noqa: E402
from conclave.vllm._method_readers import kept_modules  # noqa: E402
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

SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128}
MAPPING = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 4)


def compressed(strategy, rows, **more):
    """A configuration of compressed-tensors of 8-bit floats."""
    weights = {"type": "float", "num_bits": 8, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {"weights": weights, "input_activations": rows}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def layer_of(**arguments):
    return vllm.FusedMoE(**{**SIZES, "expert_mapping": MAPPING, **arguments})


# Static scales of rows.


@pytest.mark.parametrize("order", [("w1", "w3"), ("w3", "w1")])
def test_the_larger_input_scale_of_gate_and_up_counts(order):
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    layer = layer_of(quant_config=config)
    scales = {"w1": torch.tensor(0.5), "w3": torch.tensor([2.0])}
    for expert in range(4):
        for shard in order:
            layer.weight_loader(
                layer.w13_input_scale, scales[shard], "w13_input_scale", shard, expert
            )
    assert layer.w13_input_scale.tolist() == [2.0] * 4
    # Weights that are loaded again replace those of before, also by smaller ones.
    for shard in order:
        layer.weight_loader(layer.w13_input_scale, scales[shard] / 8, "w13_input_scale", shard, 1)
    assert layer.w13_input_scale.tolist() == [2.0, 0.25, 2.0, 2.0]


def test_input_scales_of_gate_and_up_apart():
    """[E, 2], as ModelOpt's parameters have them."""
    param = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    layer = layer_of()
    layer.weight_loader(param, torch.tensor(0.5), "w13_input_scale", "w1", 3)
    layer.weight_loader(param, torch.tensor(2.0), "w13_input_scale", "w3", 3)
    assert param.tolist() == [[0, 0]] * 3 + [[0.5, 2.0]]


# Configurations.


@pytest.mark.parametrize("rows", [{"dynamic": True, "strategy": "group"}, None])
def test_blocks_of_compressed_tensors_load_and_run(rows):
    """Scales by block are named weight_scale there."""
    _, w1, w2, *_ = random_case(4, 1, 128, 128, 4, 2, torch.float32)
    layer = layer_of(
        quant_config=compressed("block", rows), prefix=f"ctblock{rows is None}.0.experts"
    )
    parts = {"w1": w1[:, :128], "w3": w1[:, 128:], "w2": w2}
    exact, tensors = {}, {}
    for name, part in parts.items():
        codes, scales, exact[name] = quantise_weights(part, "block")
        for expert in range(4):
            tensors[f"{expert}.{name}.weight"] = codes[expert]
            tensors[f"{expert}.{name}.weight_scale"] = scales[expert]
    assert len(layer.load_weights(tensors.items())) == 24
    hidden, logits = torch.randn(9, 128), torch.randn(9, 4)
    weights, ids = torch.topk(torch.softmax(logits.double(), -1), 2)
    weights = weights / weights.sum(1, keepdim=True)
    w13 = torch.cat([exact["w1"], exact["w3"]], 1)
    out = layer(hidden, logits)
    if rows is None:
        expected = experts_reference(hidden, w13, exact["w2"], weights, ids)
        assert worst_error(out, expected) <= HALF_BAR
    else:
        case = (hidden, w13, exact["w2"], weights, ids)
        quantise = lambda r: fp8_rows(r, 128)  # noqa: E731
        assert worst_quantised_error(out, *case, quantise=quantise) <= HALF_BAR


def test_static_rows_do_not_go_with_blocks():
    with pytest.raises(ConclaveUnsupportedError, match="static"):
        layer_of(quant_config=compressed("block", {"dynamic": False}))


PREFIX = "model.layers.0.mlp.experts"
IGNORED = [
    "re:.*mlp.experts.*",
    "re:.*experts",
    r"re:model\.layers\.0\..*",
    "re:.*_proj$",
    "model.layers.0",
    PREFIX,
]
QUANTISED = [
    "lm_head",
    "re:.*lm_head",
    "re:.*mlp.gate$",
    "re:.*shared_expert.*",
    "re:mlp.experts",  # a pattern is matched from the beginning
    "model.layers.00",
    "model.layers.0.mlp.expert",
]


@pytest.mark.parametrize("entry", IGNORED)
def test_ignored_layers_are_plain(entry):
    config = compressed("channel", {"dynamic": True}, ignore=["lm_head", entry])
    assert layer_of(quant_config=config, prefix=PREFIX).w13_weight.dtype == torch.float32


@pytest.mark.parametrize("entry", QUANTISED)
def test_layers_that_are_not_ignored_are_quantised(entry):
    config = compressed("channel", {"dynamic": True}, ignore=[entry])
    assert layer_of(quant_config=config, prefix=PREFIX).w13_weight.dtype == torch.float8_e4m3fn


def test_rules_that_change_modules_leave_none_out():
    rules = {"-:.*mlp.gate": {}, "+:.*experts": {"bits": 8}, ".*down_proj": {"bits": 3}}
    config = {"dynamic": rules, "ignore": ["lm_head"]}
    assert kept_modules(config) == ["lm_head", "re:.*mlp.gate"]


def test_matrices_of_the_experts_named_one_by_one():
    names = [f"{PREFIX}.{e}.{p}" for e in range(4) for p in ("w1", "w2", "w3")]
    config = compressed("channel", {"dynamic": True}, ignore=names)
    assert layer_of(quant_config=config, prefix=PREFIX).w13_weight.dtype == torch.float32


def test_ignoring_a_part_of_an_expert_is_refused():
    config = compressed("channel", {"dynamic": True}, ignore=["re:.*down_proj"])
    with pytest.raises(ConclaveUnsupportedError, match=r"ignores down_proj"):
        layer_of(quant_config=config, prefix=PREFIX)
    config["ignore"] = ["re:(unclosed"]
    with pytest.raises(ConclaveValueError, match=r"ignore: 're:\(unclosed'"):
        layer_of(quant_config=config, prefix=PREFIX)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_biases_of_a_layer_with_a_ready_configuration_are_added(tp_size):
    generator = seeded(3)
    w13, w2 = torch.randn(4, 256, 128, generator=generator) / 8, torch.randn(4, 128, 128) / 8
    b13, b2 = torch.randn(4, 256, generator=generator), torch.randn(4, 128, generator=generator)
    hidden, logits = torch.randn(7, 128), torch.randn(7, 4)
    total = torch.zeros(7, 128, dtype=torch.float64)
    for rank in range(tp_size):
        layer = layer_of(
            quant_config=vllm.FusedMoEQuantConfig.make(),
            has_bias=True,
            moe_parallel_config=vllm.FusedMoEParallelConfig(tp_size=tp_size, tp_rank=rank),
        )
        for expert in range(4):
            for shard, half in (("w1", slice(0, 128)), ("w3", slice(128, 256))):
                layer.weight_loader(
                    layer.w13_weight, w13[expert, half], "w13_weight", shard, expert
                )
                layer.weight_loader(layer.w13_bias, b13[expert, half], "w13_bias", shard, expert)
            layer.weight_loader(layer.w2_weight, w2[expert], "w2_weight", "w2", expert)
            layer.weight_loader(layer.w2_bias, b2[expert], "w2_bias", "w2", expert)
        total += layer(hidden, logits).double()
    weights, ids = torch.topk(torch.softmax(logits.double(), -1), 2)
    weights = weights / weights.sum(1, keepdim=True)
    expected = experts_reference(hidden, w13, w2, weights, ids, w1_bias=b13, w2_bias=b2)
    assert worst_error(total, expected) <= (FLOAT32_BAR if tp_size == 1 else 1e-5)


def test_two_sources_of_biases_are_refused():
    config = vllm.biased_moe_quant_config(torch.zeros(4, 256), None)
    with pytest.raises(ConclaveValueError, match="has_bias"):
        layer_of(quant_config=config, has_bias=True)


# Tensors that are larger than what all ranks hold.


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("name", "shard", "shape"),
    [
        ("w13_weight", "w1", (140, 128)),
        ("w13_weight", "w1", (256, 128)),  # gate and up in one
        ("w13_weight", "w3", (256, 128)),
        ("w13_weight", "w1", (4, 256, 128)),  # of all experts
        ("w2_weight", "w2", (128, 140)),
        ("w2_weight", "w2", (4, 128, 256)),
        ("w13_bias", "w1", (256,)),
        ("w13_bias", "w3", (129,)),
        ("w13_weight", "w1", (127, 128)),
        ("w2_weight", "w2", (128, 64)),
        ("w13_weight", "w1", (128,)),
    ],
)
def test_tensors_of_another_size_are_refused(name, shard, shape, tp_size):
    split = vllm.FusedMoEParallelConfig(tp_size=tp_size, tp_rank=tp_size - 1)
    layer = layer_of(has_bias=True, moe_parallel_config=split)
    param = getattr(layer, name)
    with pytest.raises(ConclaveValueError, match=name):
        layer.weight_loader(param, torch.ones(shape), name, shard, 0)
    assert not param.any()


def test_combined_scales_of_gate_and_up_are_refused():
    config = compressed("channel", {"dynamic": True})
    layer = layer_of(quant_config=config)
    with pytest.raises(ConclaveValueError, match="w13_weight_scale"):
        layer.weight_loader(layer.w13_weight_scale, torch.ones(256, 1), "w13_weight_scale", "w1", 0)
    config = compressed("block", None)
    layer = layer_of(quant_config=config)
    with pytest.raises(ConclaveValueError, match="w13_weight_scale"):
        layer.weight_loader(layer.w13_weight_scale, torch.ones(2, 1), "w13_weight_scale", "w1", 0)


def test_a_scalar_fills_its_own_half():
    layer = layer_of(quant_config=compressed("block", None))
    scale = layer.w13_weight_scale
    layer.weight_loader(scale, torch.tensor(2.0), "w13_weight_scale", "w1", 0)
    layer.weight_loader(scale, torch.tensor(3.0), "w13_weight_scale", "w3", 0)
    assert scale[0].flatten().tolist() == [2.0, 3.0]


# Names.


def test_names_that_no_row_takes_are_an_error():
    layer = layer_of(prefix="model.layers.7.mlp.experts")
    names = ["layers.7.moe.0.w1.weight", "layers.7.moe.0.w2.weight", "layers.7.moe.0.w3.weight"]
    with pytest.raises(ConclaveValueError) as caught:
        layer.load_weights((name, torch.zeros(128, 128)) for name in names)
    text = str(caught.value)
    assert "0.w1.weight, 0.w2.weight" in text and "model.layers.7.mlp.experts" in text
    assert names[0] in text and names[1] in text and names[2] not in text
    assert layer.load_weights([]) == []


def test_names_that_an_error_shows_are_those_that_load():
    layer = layer_of(prefix="model.layers.8.mlp.experts")
    with pytest.raises(ConclaveValueError) as caught:
        layer.load_weights([("a", torch.zeros(1))])
    shown = re.search(r"such as (\S+), (\S+), found", str(caught.value))
    for name in shown.groups():
        assert len(layer.load_weights([(name, torch.ones(128, 128))])) == 1


def test_weights_of_other_ranks_alone_are_no_error():
    split = vllm.FusedMoEParallelConfig(ep_size=2, ep_rank=1, use_ep=True)
    layer = layer_of(moe_parallel_config=split, prefix="model.layers.9.mlp.experts")
    assert layer.load_weights([("0.w1.weight", torch.zeros(128, 128))]) == []


def test_a_parameter_that_is_not_there_is_named():
    layer = layer_of(prefix="model.layers.10.mlp.experts")
    with pytest.raises(ConclaveValueError, match=r"0\.w1\.weight_scale goes to w13_weight_scale"):
        layer.load_weights([("0.w1.weight_scale", torch.zeros(1))])


def test_views_of_scales_that_are_stored_transposed():
    layer = layer_of(quant_config=compressed("channel", {"dynamic": True}))
    stored = torch.arange(4.0 * 2 * 3).reshape(4, 2, 3)
    layer.w13_weight_scale = torch.nn.Parameter(stored.transpose(1, 2), requires_grad=False)
    views = dict(zip(dict(layer.named_parameters()), layer.get_expert_weights(), strict=True))
    view = views["w13_weight_scale"]
    assert torch.equal(view, stored.reshape(4, 6))
    view[[0, 1]] = view[[1, 0]]  # as a balancer swaps two experts
    assert layer.w13_weight_scale[0, :, 0].tolist() == [6.0, 7.0, 8.0]
