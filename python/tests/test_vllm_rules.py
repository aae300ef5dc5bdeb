"""conclave.vllm.FusedMoE by configurations whose rules give modules schemes of their own."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors.torch")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, Error  # noqa: E402
from conclave.vllm._modules import LayerNames, members_of  # noqa: E402
from conclave.vllm.scheme import read_scheme  # noqa: E402
from support.method_layers import bar_of, config_of, layer_of, load, logits_for  # noqa: E402
from support.problems import worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

PREFIX = "model.layers.3.mlp.experts"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.fixture(autouse=True)
def free_names():
    """Layers of a test before may still be in cycles, and have their names."""
    gc.collect()


def of(stated, experts=4, members=(), prefix=PREFIX):
    return read_scheme(stated, LayerNames(prefix, experts, members))


def with_rules(rules, **changes):
    return {**GPTQ, **changes, "dynamic": rules}


def shape_of(scheme, name):
    """A parameter's shape for 4 experts of N 64 and H 256."""
    found = {p.name: p.shape for p in scheme.parameters(4, 128, 64, 256, torch.float32)}
    return found[name]


# Layers of files whose own settings a rule states, beside others of everything else.


def settings(name):
    stated = config_of(name)[1]
    return stated, {key: stated[key] for key in ("bits", "group_size", "desc_act", "sym")}


OTHERWISE = {"bits": 3, "group_size": 64, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe-gptq-int4-group32",
        "qwen3_moe-gptq-int4-channel",
        "qwen3_moe-gptq-int8-asymmetric",
        "qwen3_moe-gptq-int8-order",
        "qwen3_moe-gptq-int2",
        "mixtral-gptq-int3",
        "mixtral-gptq-int4-order",
    ],
)
def test_settings_of_a_rule_are_those_of_the_layer(name):
    stated, own = settings(name)
    rules = {"-:.*self_attn.*": {}, r"+:.*\.3\..*experts.*": own, ".*experts.*": {"bits": 8}}
    layer, hidden, expected = layer_of(name, {**stated, **OTHERWISE, "dynamic": rules}, PREFIX)
    tensors, taken = load(layer, name)
    assert len(taken) == len(tensors)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), expected) <= bar_of(name)


def test_a_rule_changes_what_it_names_alone():
    name = "qwen3_moe-gptq-int4-group32"
    stated, own = settings(name)
    rules = {"+:.*experts.*": {"bits": own["bits"], "group_size": own["group_size"]}}
    changed = {**stated, "bits": 8, "group_size": 64, "dynamic": rules}
    layer, hidden, expected = layer_of(name, changed, PREFIX)
    load(layer, name)
    out = layer(hidden, logits_for(layer, hidden))
    assert worst_error(out, expected) <= bar_of(name)
    # Weights that are loaded again are read by the same rule.
    with torch.no_grad():
        layer.w2_scales.mul_(2)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), 2 * expected) <= bar_of(name)


@pytest.mark.parametrize("split", [{"tp_size": 2}, {"ep_size": 2, "use_ep": True}])
def test_ranks_follow_the_same_rule(split):
    name = "qwen3_moe-gptq-int4-order"
    stated, own = settings(name)
    changed = {**stated, **OTHERWISE, "dynamic": {".*experts.*": own}}
    total = 0
    for rank in range(2):
        place = {"tp_rank": rank} if "tp_size" in split else {"ep_rank": rank}
        ranks = vllm.FusedMoEParallelConfig(**split, **place)
        layer, hidden, expected = layer_of(
            name, changed, f"model.layers.{rank}.mlp.experts", moe_parallel_config=ranks
        )
        load(layer, name)
        total = total + layer(hidden, logits_for(layer, hidden))
    assert worst_error(total, expected) <= bar_of(name)


def test_quarks_patterns_replace_the_whole_entry():
    name = "mixtral-quark-fp4"
    stated, other = config_of(name)[1], config_of("qwen3_moe-quark-fp6-e2m3")[1]
    own = stated["global_quant_config"]
    patterns = {"*q_proj": {}, "*layers.3.*experts.*": own, "*": other["global_quant_config"]}
    changed = {**other, "layer_quant_config": patterns}
    layer, hidden, expected = layer_of(name, changed, "model.layers.3.block_sparse_moe.experts")
    tensors, taken = load(layer, name)
    assert len(taken) == len(tensors)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), expected) <= bar_of(name)
    six = of({**stated, "layer_quant_config": {"*.3.*": other["global_quant_config"]}})
    assert shape_of(six, "w13_weight") == (4, 128, 192)
    four = of({**stated, "layer_quant_config": {"*.13.*": other["global_quant_config"]}})
    assert shape_of(four, "w13_weight") == (4, 128, 128)


def test_quarks_e4m3_of_some_layers_has_its_own_rows():
    """Static rows by tensor in one layer, where all others have fp4."""
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    own = {"weight": tensor, "input_tensors": tensor}
    stated = {**config_of("mixtral-quark-fp4")[1], "layer_quant_config": {"*.3.*experts*": own}}
    found = {p.name: p for p in of(stated).parameters(4, 128, 64, 256, torch.float32)}
    assert found["w13_weight"].dtype == torch.float8_e4m3fn
    assert {"w13_weight_scale", "w13_input_scale", "w2_input_scale"} <= set(found)


@pytest.mark.parametrize("target", [r"re:.*layers\.3\..*experts.*", f"{PREFIX}.0.gate_proj"])
def test_groups_of_compressed_tensors_hold_for_their_targets(target):
    name = "qwen3_moe-compressed-int4-group32"
    stated = config_of(name)[1]
    groups = stated["config_groups"]
    targets = [target] if target.startswith("re:") else expert_modules()
    own = {**groups["group_0"], "targets": targets}
    other = {"targets": ["Linear"], "weights": {**own["weights"], "group_size": 64}}
    changed = {**stated, "config_groups": {"a": other, "b": own}}
    layer, hidden, expected = layer_of(name, changed, PREFIX)
    load(layer, name)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), expected) <= bar_of(name)


def expert_modules(members=("gate_proj", "up_proj", "down_proj"), prefix=PREFIX):
    return [f"{prefix}.{expert}.{name}" for expert in range(8) for name in members]


def test_modelopts_layers_of_mixed_precision_have_their_algorithms():
    name = "qwen3_moe-modelopt-nvfp4"
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in expert_modules()}
    layers |= {"model.layers.4.mlp.experts": {"quant_algo": "FP8"}}
    stated = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    }
    layer, hidden, expected = layer_of(name, stated, PREFIX)
    load(layer, name)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), expected) <= bar_of(name)
    fp8 = of(stated, prefix="model.layers.4.mlp.experts")
    assert (fp8.weights, fp8.rows) == ("tensor", "static")
    assert not of(stated, prefix="model.layers.5.mlp.experts").is_coded


# Which rule holds.


@pytest.mark.parametrize(
    ("rules", "bits"),
    [
        ({}, 4),
        ({"+:.*experts.*": {"bits": 8}}, 8),
        ({".*experts.*": {"bits": 8}}, 8),
        ({"+:.*experts.*": {}}, 4),
        ({"+:.*experts.*": {"damp_percent": 0.1}}, 4),
        ({"+:.*experts.*": {"bits": 8}, "-:.*": {}}, 8),
        ({"-:.*experts.*": {}, "+:.*": {"bits": 8}}, None),
        ({"-:.*": {}}, None),
        ({"-:model.layers.3": {}}, None),
        ({"+:.*": {"bits": 8}, "+:.*experts.*": {"bits": 2}}, 8),
        ({"+:.*layers.13.*": {"bits": 8}}, 4),
        ({"-:experts": {}, "-:layers.3": {}}, 4),  # a rule is matched from the begin
        ({"-:.*experts$": {}}, 4),  # and by the names of matrices
        ({r"+:.*\.(gate|up|down)_proj$": {"bits": 8}}, 8),
        ({"+:.*w[123]$": {"bits": 8}}, 8),
        ({r"-:(?!.*\.experts\.).*": {}}, 4),
        ({r"-:(?!.*shared).*proj": {}}, None),
        ({r"+:(?=model).*layers\.\d{1,2}\.mlp": {"bits": 8}}, 8),
        ({r"+:.*layers\.\d{2}\.": {"bits": 8}}, 4),
        ({r"+:.*\bexperts\b": {"bits": 8}}, 8),
    ],
)
def test_the_first_rule_that_holds_counts(rules, bits):
    found = of(with_rules(rules))
    if bits is None:
        assert not found.is_coded and found.weights == "none"
    else:
        assert shape_of(found, "w13_qweight") == (4, 256 * bits // 32, 128)


def test_what_a_rule_says_of_groups_order_and_zeros():
    rules = {".*experts.*": {"group_size": 32, "desc_act": True, "sym": False}}
    found = of(with_rules(rules))
    assert shape_of(found, "w13_scales") == (4, 8, 128)
    assert found.has_all_groups
    used = {plane.name: plane for plane in found.planes}
    assert used["qzeros"].is_read and used["g_idx"].is_of_columns
    whole = of(with_rules({".*experts.*": {"group_size": -1}}))
    assert shape_of(whole, "w13_scales") == (4, 1, 128)


def test_marlins_name_follows_rules_too():
    found = of(with_rules({".*experts.*": {"bits": 8}}, quant_method="gptq_marlin"))
    assert shape_of(found, "w13_qweight") == (4, 64, 128)


def test_a_layer_that_rules_leave_out_holds_values():
    layer = vllm.FusedMoE(
        4, 2, 64, 64, quant_config=with_rules({"-:.*layers.3.*": {}}), prefix=PREFIX
    )
    assert layer.w13_weight.dtype == torch.get_default_dtype()
    assert layer.moe_quant_config is not None and not layer.moe_quant_config.is_quantized


def test_names_of_matrices_are_those_of_the_mapping():
    mapping = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 4)
    assert members_of(mapping) == ("w1", "w2", "w3")
    assert members_of(None) == ()
    rules = {"+:.*w[123]$": {"bits": 8}, "+:.*proj$": {"bits": 2}}
    assert shape_of(of(with_rules(rules), members=members_of(mapping)), "w2_qweight")[1] == 16
    with pytest.raises(ConclaveUnsupportedError, match="expert_mapping: needed for"):
        of(with_rules(rules))


# What is refused.


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"+:.*down_proj": {"bits": 8}}, ("down_proj", "gate_proj")),
        ({"-:.*down_proj": {}}, ("down_proj", "gate_proj")),
        ({"+:.*w2": {"group_size": 32}}, ("w2", "w1")),
        ({r"+:.*experts\.2\..*": {"sym": False}}, ("experts.2.gate_proj", "experts.0.gate_proj")),
        ({"+:.*experts.*": {"bits": 5}}, ("codes of 5 bits",)),
        ({r"+:.*experts\Z": {"bits": 8}}, ("expression", r"experts\Z")),
        ({"+:.*(": {"bits": 8}}, ("expression", ".*(")),
    ],
)
def test_rules_that_no_layer_follows_are_refused(rules, words):
    with pytest.raises(ConclaveUnsupportedError) as caught:
        of(with_rules(rules))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": "8"}, ("bits", "8")),
        ({"group_size": 0}, ("group_size", "0")),
        ({"sym": 1}, ("sym", "1")),
        ({"desc_act": "no"}, ("desc_act", "no")),
    ],
)
def test_values_of_rules_that_no_package_writes_are_errors(change, words):
    with pytest.raises(Error) as caught:
        of(with_rules({".*experts.*": change}))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "stated",
    [
        with_rules({".*experts.*": {"bits": 8}}),
        {
            **config_of("mixtral-quark-fp4")[1],
            "layer_quant_config": {
                "*experts*": config_of("qwen3_moe-quark-fp6-e2m3")[1]["global_quant_config"]
            },
        },
        config_of("qwen3_moe-mixed-int4-int8-down")[1],
    ],
)
def test_a_layer_without_a_name_cannot_follow_rules(stated):
    with pytest.raises(ConclaveUnsupportedError, match="prefix: expected the layer's name"):
        of(stated, prefix="")


@pytest.mark.parametrize("name", ["qwen3_moe-mixed-int4-int8-down", "qwen3_moe-mixed-experts"])
def test_matrices_of_several_schemes_are_refused_by_name(name):
    with pytest.raises(ConclaveUnsupportedError, match=r"experts\.\d\.\w+_proj"):
        of(config_of(name)[1], prefix="model.layers.0.mlp.experts")


def test_groups_with_one_scheme_are_one():
    groups = {
        "a": {"targets": ["re:.*gate_proj"], "weights": {**FLOAT8, "strategy": "channel"}},
        "b": {"targets": ["re:.*proj"], "weights": {**FLOAT8, "strategy": "tensor"}},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(ConclaveUnsupportedError, match="rules that tell"):
        of(config)
    groups["b"]["weights"] = groups["a"]["weights"]
    assert of(config).weights == "channel"
