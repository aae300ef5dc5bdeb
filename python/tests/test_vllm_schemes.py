"""From configurations of e4m3 weights to parameters and rows: what the library's reader says of a
configuration, a layer has."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import _conclave, vllm  # noqa: E402
from conclave._methods import needs_plain_rows  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveCheckpointError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    Error,
)
from conclave.spec import MoeSpec, QuantSpec, to_dict, weight_forms  # noqa: E402
from conclave.vllm._modules import LayerNames  # noqa: E402
from conclave.vllm.scheme import read_scheme  # noqa: E402

PREFIX = "model.layers.0.mlp.experts"
NAMES = LayerNames(PREFIX, 4)
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {**FLOAT8, "dynamic": True, "strategy": "token"}


def compressed(weights, rows=None, **more):
    group = {"weights": {**FLOAT8, **weights}, "input_activations": rows}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def in_blocks(rows, shape=(128, 128)):
    return compressed({"strategy": "block", "block_structure": list(shape)}, rows)


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quantization": {"quant_algo": algorithm}}


STATIC = {**FLOAT8, "dynamic": False, "strategy": "tensor"}
GROUPS = {**DYNAMIC, "strategy": "group", "group_size": 128}
WIDE = (128, 128)
CASES = [
    ({"quant_method": "fp8"}, "tensor", "dynamic", None, "weight_scale"),
    ({"quant_method": "fp8", "fmt": "e4m3"}, "tensor", "dynamic", None, "weight_scale"),
    (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "tensor",
        "static",
        None,
        "weight_scale",
    ),
    (BLOCK, "block", "dynamic", WIDE, "weight_scale_inv"),
    ({**BLOCK, "weight_block_size": [1, 128]}, "block", "dynamic", (1, 128), "weight_scale_inv"),
    ({**BLOCK, "scale_fmt": "ue8m0"}, "block", "dynamic", WIDE, "weight_scale_inv"),
    (compressed({"strategy": "tensor"}), "tensor", "none", None, "weight_scale"),
    (compressed({"strategy": "tensor"}, STATIC), "tensor", "static", None, "weight_scale"),
    (compressed({"strategy": "channel"}, DYNAMIC), "channel", "token", None, "weight_scale"),
    (
        compressed({"strategy": "channel"}, {**DYNAMIC, "strategy": "tensor"}),
        "channel",
        "token",
        None,
        "weight_scale",
    ),
    (in_blocks(None), "block", "none", WIDE, "weight_scale"),
    (in_blocks(GROUPS), "block", "dynamic", WIDE, "weight_scale"),
    (in_blocks(DYNAMIC), "block", "dynamic", WIDE, "weight_scale"),
    ({**BLOCK, "weight_block_size": [64, 32]}, "block", "dynamic", (64, 32), "weight_scale_inv"),
    (in_blocks(None, (64, 32)), "block", "none", (64, 32), "weight_scale"),
    (
        in_blocks({**GROUPS, "group_size": 32}, (64, 32)),
        "block",
        "dynamic",
        (64, 32),
        "weight_scale",
    ),
    (modelopt("FP8"), "tensor", "static", None, "weight_scale"),
    (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "channel", "token", None, "weight_scale"),
    (modelopt("FP8_PB_WO"), "block", "none", WIDE, "weight_scale"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor", "static", None, "weight_scale"),
]


@pytest.mark.parametrize(("config", "weights", "rows", "block", "suffix"), CASES)
def test_schemes_of_e4m3(config, weights, rows, block, suffix):
    found = read_scheme(config, NAMES)
    assert (found.weights, found.rows, found.block, found.suffix) == (weights, rows, block, suffix)
    assert found.codes == torch.float8_e4m3fn and not found.encodes


@pytest.mark.parametrize(("config", "weights", "rows", "block", "suffix"), CASES)
def test_parameters_and_configurations_follow_schemes(config, weights, rows, block, suffix):
    layer = vllm.FusedMoE(4, 2, 256, 128, quant_config=config)
    found = {name for name, _ in layer.named_parameters()}
    expected = {"w13_weight", "w2_weight", f"w13_{suffix}", f"w2_{suffix}"}
    if rows == "static":
        expected |= {"w13_input_scale", "w2_input_scale"}
    assert found == expected
    quant = layer.moe_quant_config
    assert quant.per_act_token_quant == (rows == "token")
    assert quant.per_out_ch_quant == (weights == "channel")
    assert quant.block_shape == (None if block is None else list(block))
    assert quant.is_quantized == (rows != "none")


def test_groups_of_a_row_share_a_scale_as_blocks_of_one_row():
    config = compressed({"strategy": "group", "group_size": 128}, None)
    found = read_scheme(config, NAMES)
    assert (found.weights, found.block, found.suffix) == ("block", (1, 128), "weight_scale")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (in_blocks(STATIC), "config_groups: static scales do not go with blocks"),
        ({**BLOCK, "activation_scheme": "static"}, "activation_scheme: static scales"),
        (
            in_blocks({**GROUPS, "group_size": 64}),
            r"config_groups: .* found groups of 64 beside blocks of \[128, 128\]",
        ),
        (
            compressed({"strategy": "channel"}, {**GROUPS, "group_size": 32}),
            "config_groups: rows in groups of 32 columns",
        ),
        (compressed({"strategy": "vector"}), "compressed-tensors does not run here: .*vector"),
        (compressed({"strategy": "channel"}, {**DYNAMIC, "type": "int"}), "activations in I8"),
        (compressed({"strategy": "channel"}, transform_config={"a": 1}), "transforms"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 does not run here: codes of .*e5m2"),
        (modelopt("W4A8_LUT"), "modelopt does not run here: the algorithm .*W4A8_LUT"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes does not run here: neither 4 nor 8"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "gptq .*: codes of 5 bits"),
    ],
)
def test_what_does_not_run_is_named_with_its_value(config, words):
    with pytest.raises(ConclaveUnsupportedError, match=words):
        read_scheme(config, NAMES)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fp8", "activation_scheme": "maybe"}, ("activation_scheme", "maybe")),
        ({**BLOCK, "weight_block_size": [128]}, ("weight_block_size",)),
        ({**BLOCK, "weight_block_size": [128, 0]}, ("weight_block_size[1]", "0")),
        ({**BLOCK, "weight_block_size": [128, "128"]}, ("weight_block_size[1]", "128")),
        ({"quant_method": "fp8", "activation_scheme": 8}, ("activation_scheme", "8")),
        ({"quant_method": "compressed-tensors"}, ("config_groups",)),
        (modelopt(8), ("quantization.quant_algo", "8")),
        ({**BLOCK, "modules_to_not_convert": "lm_head"}, ("modules_to_not_convert", "lm_head")),
        ({"quant_method": "gptq", "bits": "4", "group_size": 128}, ("bits", "4")),
    ],
)
def test_values_that_no_method_writes_are_errors(config, words):
    with pytest.raises(ConclaveCheckpointError) as caught:
        read_scheme(config, NAMES)
    assert all(word in str(caught.value) for word in words), caught.value


class Fp8Config:
    """As vLLM's class of this name."""

    def __init__(self, **stated):
        self.activation_scheme = "dynamic"
        self.ignored_layers: list[str] = []
        self.weight_block_size = None
        self.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
        self.target = torch.float8_e4m3fn
        self.__dict__.update(stated)

    def get_name(self):
        return "fp8"


def test_objects_state_by_their_attributes():
    assert read_scheme(Fp8Config(), NAMES).rows == "dynamic"
    assert read_scheme(Fp8Config(activation_scheme="static"), NAMES).rows == "static"
    assert read_scheme(Fp8Config(weight_block_size=[128, 128]), NAMES).block == WIDE
    assert read_scheme(Fp8Config(is_checkpoint_fp8_serialized=False), NAMES).encodes
    assert not read_scheme(Fp8Config(ignored_layers=[PREFIX]), NAMES).is_coded


def vllms(name, **attributes):
    """An object that keeps what it was made of as vLLM's does."""
    return types.SimpleNamespace(get_name=lambda: name, **attributes)


GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "scale_format": "e8m0",
        }
    },
}
CHANNEL = compressed({"strategy": "channel"}, DYNAMIC)
LAYERS = {f"{PREFIX}.{e}": {"quant_algo": "FP8"} for e in range(4)}
OBJECTS = [
    (vllms("gptq", weight_bits=8, group_size=32, desc_act=True, is_sym=True), GPTQ),
    (vllms("gptq", weight_bits=8, group_size=32, desc_act=True), {**GPTQ, "sym": False}),
    (vllms("gptq_marlin", weight_bits=8, full_config=GPTQ), GPTQ),
    (vllms("awq", weight_bits=4, group_size=32, zero_point=True), AWQ),
    (vllms("awq_marlin", weight_bits=4, group_size=32, zero_point=True, full_config=AWQ), AWQ),
    (vllms("quark", quant_config=QUARK, kv_cache_group=[], pack_method="reorder"), QUARK),
    (vllms("compressed-tensors", config=CHANNEL, quant_format="float-quantized"), CHANNEL),
    (vllms("modelopt", quant_method="FP8", exclude_modules=["lm_head"]), modelopt("FP8")),
    (vllms("modelopt", quant_method="FP8_PB_WO"), modelopt("FP8_PB_WO")),
    (vllms("modelopt", is_checkpoint_fp8_serialized=True), modelopt("FP8")),
    (vllms("modelopt_fp4", group_size=16, exclude_modules=[]), modelopt("NVFP4")),
    (vllms("modelopt_mxfp8", exclude_modules=[]), modelopt("MXFP8")),
    (vllms("modelopt_mixed", quantized_layers=LAYERS), modelopt("FP8")),
]


def described(scheme):
    """Parameters for E 4, N 64 and H 128."""
    return [declared[:3] for declared in scheme.parameters(4, 128, 64, 128, torch.float32)]


@pytest.mark.parametrize(("found", "stated"), OBJECTS)
def test_vllms_objects_are_read_as_what_they_were_made_of(found, stated):
    assert described(read_scheme(found, NAMES)) == described(read_scheme(stated, NAMES))


def test_rules_of_an_object_are_followed():
    rules = {r"+:.*\.0\.mlp.*": {"bits": 4}, "-:.*": {}}
    found = vllms("gptq_marlin", weight_bits=8, group_size=32, dynamic=rules, full_config=GPTQ)
    four = read_scheme({**GPTQ, "bits": 4}, NAMES)
    assert described(read_scheme(found, NAMES)) == described(four)
    other = LayerNames(PREFIX.replace("0", "1"), 4)
    assert not read_scheme(found, other).is_coded


@pytest.mark.parametrize("config", [{}, {"bits": 4}, {"quant_method": None}, 4, "fp8", object()])
def test_what_names_no_method_is_refused(config):
    with pytest.raises(ConclaveTypeError, match=f"found {type(config).__name__}"):
        read_scheme(config, NAMES)


def test_mappings_may_hold_what_json_does_not():
    inner = types.MappingProxyType({**FLOAT8, "strategy": "channel", "scale_dtype": torch.float32})
    config = compressed({}, None, ignore=("lm_head",), torch_dtype=torch.bfloat16)
    config["config_groups"]["group_0"]["weights"] = inner
    assert read_scheme(types.MappingProxyType(config), NAMES).weights == "channel"


def test_a_layer_that_is_left_out_needs_no_method_that_is_read():
    config = {"quant_method": "hqq", "modules_to_not_convert": [PREFIX]}
    assert not read_scheme(config, NAMES).is_coded
    with pytest.raises(Error, match="hqq"):
        read_scheme({**config, "modules_to_not_convert": []}, NAMES)


# Rows that a GPU does not make.


def test_rows_stay_plain_on_a_gpu_where_the_library_makes_none():
    by_name = {
        form.name: MoeSpec(weight_dtype=form.dtype, quant=form.quant) for form in weight_forms()
    }
    odd = QuantSpec(weights="channel", activations="group", activation_group=32)
    by_name["odd groups"] = MoeSpec(weight_dtype="int8", quant=odd)
    plain = {name for name, spec in by_name.items() if needs_plain_rows(spec, "cuda:0")}
    assert plain == {"odd groups"}
    assert {"mxfp8", "mxfp4-rows", "nvfp4-rows", "fp8-static", "int8-token"} <= set(by_name)
    assert not any(needs_plain_rows(spec, "cpu") for spec in by_name.values())


def test_why_a_gpu_makes_no_such_rows_is_the_librarys_reason():
    quant = QuantSpec(weights="channel", activations="group", activation_group=32)
    spec = {"weight_dtype": "int8", "quant": to_dict(quant) | {"activation_dtype": "int8"}}
    assert "found 32" in _conclave.gpu_rows_reason(spec)
