"""Experts whose rows are multiplied by factors of columns before they are codes, as ModelOpt's AWQ
stores them for conclave.vllm.FusedMoE."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors.torch")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error  # noqa: E402
from support.method_layers import expert_tensors, layer_of, load, logits_for  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

PLAIN = "qwen3_moe-modelopt-awq"  # E 4, N 64, H 96, groups of 32
WITH_ROWS = "mixtral-modelopt-awq-rows"  # E 3, N 64, H 128, groups of 64


def shapes_of(name):
    layer, *_ = layer_of(name)
    return {key: (tuple(p.shape), p.dtype) for key, p in layer.named_parameters()}


def test_parameters_have_the_layout_of_files():
    number = torch.float32
    assert shapes_of(PLAIN) == {
        "w13_weight": ((4, 64, 96), torch.uint8),
        "w2_weight": ((4, 48, 64), torch.uint8),
        "w13_weight_scale": ((4, 128, 3), number),
        "w2_weight_scale": ((4, 96, 2), number),
        "w13_pre_quant_scale": ((4, 2, 96), number),
        "w2_pre_quant_scale": ((4, 64), number),
    }
    more = {key: shape for key, (shape, _) in shapes_of(WITH_ROWS).items()}
    assert more["w13_input_scale"] == more["w2_input_scale"] == (3,)
    assert (more["w13_weight_scale_2"], more["w2_weight_scale_2"]) == ((3, 2), (3,))


@pytest.mark.parametrize(("name", "bar"), [(PLAIN, FLOAT32_BAR), (WITH_ROWS, HALF_BAR)])
def test_factors_that_were_not_loaded_are_ones(name, bar):
    layer, hidden, expected = layer_of(name)
    tensors, _ = load(layer, name)
    logits = logits_for(layer, hidden)
    before = layer(hidden, logits)
    assert worst_error(before, expected) <= bar
    with torch.no_grad():
        layer.w2_pre_quant_scale.fill_(1)
    ones = layer(hidden, logits)
    assert not torch.equal(ones, before)
    without = {key: t for key, t in tensors.items() if not is_factor_of_down(key)}
    other, *_ = layer_of(name)
    other.layer_name = "model.layers.0.mlp.experts"
    assert len(other.load_weights(without.items())) == len(without) < len(tensors)
    assert torch.equal(other(hidden, logits), ones)


def is_factor_of_down(name):
    return name.endswith(("down_proj.pre_quant_scale", "w2.pre_quant_scale"))


def test_factors_of_a_half_halve_what_down_reads():
    layer, hidden, _ = layer_of(PLAIN)
    load(layer, PLAIN)
    logits = logits_for(layer, hidden)
    whole = layer(hidden, logits)
    with torch.no_grad():
        layer.w2_pre_quant_scale.mul_(0.5)
    assert worst_error(layer(hidden, logits), whole.double() / 2) <= FLOAT32_BAR


def test_gate_and_up_of_different_factors_are_refused():
    layer, hidden, _ = layer_of(PLAIN)
    load(layer, PLAIN)
    with torch.no_grad():
        layer.w13_pre_quant_scale[2, 1, 5] *= 2
    with pytest.raises(Error, match=r"pre_quant_scale|factor"):
        layer(hidden, logits_for(layer, hidden))


def test_slices_have_the_factors_of_their_columns():
    tensors = expert_tensors(PLAIN)
    for rank in range(2):
        split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=rank)
        layer, *_ = layer_of(PLAIN, moe_parallel_config=split)
        load(layer, PLAIN)
        mine = slice(32 * rank, 32 * rank + 32)
        whole = tensors["3.down_proj.pre_quant_scale"].float()
        assert torch.equal(layer.w2_pre_quant_scale[3], whole[mine])
        shared = tensors["3.up_proj.pre_quant_scale"].float()
        assert torch.equal(layer.w13_pre_quant_scale[3, 1], shared)


@pytest.mark.parametrize("shape", [(95,), (97,), (2, 96), (192,)])
def test_factors_of_another_number_of_columns_are_refused(shape):
    layer, *_ = layer_of(PLAIN)
    param = layer.w13_pre_quant_scale
    with pytest.raises(ConclaveValueError, match="w13_pre_quant_scale: w3 expected shape"):
        layer.weight_loader(param, torch.ones(shape), "w13_pre_quant_scale", "w3", 0)


def test_nvfp4_with_factors_multiplies_rows_first():
    """Factors of powers of two go through quantised rows unchanged where a group has one."""
    name = "qwen3_moe-modelopt-nvfp4"
    plain, hidden, _ = layer_of(name)
    load(plain, name)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16}
    layer, *_ = layer_of(name, config)
    load(layer, name)
    assert tuple(layer.w13_pre_quant_scale.shape) == (4, 2, 96)
    logits = logits_for(layer, hidden)
    assert torch.equal(layer(hidden, logits), plain(hidden, logits))
    with torch.no_grad():
        layer.w13_pre_quant_scale.fill_(0.5)
    assert torch.equal(layer(hidden * 2, logits), plain(hidden, logits))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("config", [MODELOPT, AWQ, {**GPTQ, "sym": False}, NF4])
def test_alternating_rows_within_elements_are_refused(config):
    with pytest.raises(ConclaveUnsupportedError, match="activation: rows of gate and up alternate"):
        vllm.FusedMoE(4, 2, 64, 64, quant_config=config, activation="swigluoai")
    vllm.FusedMoE(4, 2, 64, 64, quant_config=config, activation="silu")


def test_alternating_rows_of_words_along_columns_run():
    layer = vllm.FusedMoE(4, 2, 64, 64, quant_config={**GPTQ, "sym": True}, activation="swigluoai")
    assert tuple(layer.w13_qweight.shape) == (4, 8, 128)
