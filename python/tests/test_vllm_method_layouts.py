"""Parameters of packed experts: their shapes, how they are filled, and codes made at loading."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
load_file = pytest.importorskip("safetensors.torch").load_file

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error  # noqa: E402
from conclave.vllm.weights import pack_flat, unpack_flat  # noqa: E402
from support.method_layers import (  # noqa: E402
    QUANTISED,
    golden_of,
    layer_of,
    load,
    logits_for,
)
from support.problems import FLOAT32_BAR, expected_output, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

# Layouts.


def test_parameters_have_the_shapes_of_vllm():
    """E 4, N 64, H 96: words of 8 codes, groups of 32."""
    shapes = {
        "qwen3_moe-gptq-int4-group32": {
            "w13_qweight": (4, 12, 128),
            "w13_scales": (4, 3, 128),
            "w13_qzeros": (4, 3, 16),
            "w2_qweight": (4, 8, 96),
            "w2_g_idx": (4, 64),
        },
        "qwen3_moe-awq-group32": {"w13_qweight": (4, 96, 16), "w2_qzeros": (4, 2, 12)},
        "qwen3_moe-compressed-int4-asymmetric": {
            "w13_weight_packed": (4, 12, 128),
            "w13_weight_scale": (4, 3, 128),
            "w2_weight_packed": (4, 8, 96),
        },
        "qwen3_moe-modelopt-nvfp4": {
            "w13_weight": (4, 128, 48),
            "w13_weight_scale": (4, 128, 6),
            "w13_weight_scale_2": (4, 2),
            "w2_weight_scale_2": (4,),
            "w13_input_scale": (4, 2),
        },
        "qwen3_moe-bnb-nf4": {"w13_weight": (4, 64 * 128, 1)},
        "qwen3_moe-quark-int4": {
            "w13_weight": (4, 96, 16),
            "w13_weight_scale": (4, 3, 128),
            "w2_weight_zero_point": (4, 2, 12),
        },
        # E 3, N 40, H 72.
        "qwen3_moe-quark-channel-int4": {
            "w13_weight": (3, 80, 9),
            "w13_weight_scale": (3, 80, 1),
            "w13_weight_zero_point": (3, 10),
        },
        "mixtral-quark-int8-static": {
            "w13_weight": (3, 80, 72),
            "w13_weight_scale": (3, 2),
            "w2_weight_scale": (3,),
            "w2_input_scale": (3,),
            "w13_input_zero_point": (3,),
        },
    }
    for name, expected in shapes.items():
        layer, *_ = layer_of(name)
        found = {key: tuple(getattr(layer, key).shape) for key in expected}
        assert found == expected, name
        assert layer.moe_quant_config is None
    gptq, *_ = layer_of("qwen3_moe-gptq-int4-group32")
    assert gptq.w13_qweight.is_transposed and gptq.w13_scales.quant_method == "group"
    assert [view.shape[0] for view in gptq.get_expert_weights()] == [4] * 8


def test_zero_points_of_symmetric_integers_are_checked():
    layer, hidden, _ = layer_of("qwen3_moe-quark-int8-token")
    load(layer, "qwen3_moe-quark-int8-token")
    layer(hidden, logits_for(layer, hidden))
    with torch.no_grad():
        layer.w13_weight_zero_point[1, 40] = 3
    with pytest.raises(Error, match=r"up_proj.weight_zero_point.*found 3"):
        layer(hidden, logits_for(layer, hidden))


def test_layers_follow_their_parameters():
    """What is written after a forward is seen by the next, also beside bitsandbytes' codes."""
    for name, key in (("qwen3_moe-gptq-int4-group32", "w2_scales"), ("qwen3_moe-bnb-nf4", None)):
        layer, hidden, expected = layer_of(name)
        load(layer, name)
        logits = logits_for(layer, hidden)
        assert worst_error(layer(hidden, logits), expected) <= FLOAT32_BAR
        if key is not None:
            getattr(layer, key).data.mul_(1)
            with torch.no_grad():
                getattr(layer, key).mul_(2)
        else:
            for where, tensor in list(layer.w2_weight.aids.items()):
                if where[2] == "absmax":
                    layer.weight_loader(
                        layer._parameter_of("w2_weight.absmax", ""),
                        2 * tensor,
                        "w2_weight.absmax",
                        "w2",
                        where[0],
                    )
        assert worst_error(layer(hidden, logits), 2 * expected) <= FLOAT32_BAR


@pytest.mark.parametrize("padded", [64, 96])
def test_stacks_of_gpt_oss_fill_parameters_that_may_be_padded(padded):
    name = "gpt_oss-mxfp4"
    hidden, ids, weights, expected = golden_of(name)
    layer = vllm.FusedMoE(
        4,
        ids.shape[1],
        96,
        padded,
        params_dtype=torch.float32,
        quant_config={"quant_method": "mxfp4"},
        activation="swigluoai",
        swiglu_limit=7.0,
        has_bias=True,
        custom_routing_function=lambda **_: (weights, ids),
    )
    stored = load_file(QUANTISED / name / "model.safetensors")
    parts = {"_blocks": "weight", "_scales": "weight_scale", "_bias": "bias"}
    for matrix, prefix in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        for suffix, parameter in parts.items():
            key = f"{prefix}_{parameter}"
            source = stored[f"model.layers.0.mlp.experts.{matrix}{suffix}"]
            assert layer.weight_loader(getattr(layer, key), source, key, None, None, True)
    assert worst_error(layer(hidden, logits_for(layer, hidden)), expected) <= FLOAT32_BAR
    large = torch.zeros(4, 97, padded // 2, dtype=torch.uint8)
    with pytest.raises(ConclaveValueError, match="w2_weight"):
        layer.weight_loader(layer.w2_weight, large, "w2_weight", None, None)


def test_tensors_that_do_not_fit_are_named():
    layer, *_ = layer_of("qwen3_moe-gptq-int4-group32")
    words = torch.zeros(12, 64, dtype=torch.int32)

    def refusal(name, tensor, shard="w1"):
        with pytest.raises(Error) as caught:
            layer.weight_loader(getattr(layer, name), tensor, name, shard, 1)
        return str(caught.value)

    assert "expected torch.int32" in refusal("w13_qweight", words.float())
    assert "w13_qweight" in refusal("w13_qweight", words[:-1])
    assert "w2_scales" in refusal("w2_scales", torch.zeros(3, 96), "w2")
    with pytest.raises(ConclaveValueError, match="expert by expert"):
        layer.weight_loader(layer.w13_qweight, words, "w13_qweight", None, None)
    with pytest.raises(ConclaveUnsupportedError, match="awq-ipex does not run"):
        layer_of("qwen3_moe-gptq-int4-group32", {"quant_method": "awq-ipex"})


# ModelOpt.


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
SPARSE = {
    "quant_method": "compressed-tensors",
    "format": "marlin-24",
    "config_groups": {"0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
}


@pytest.mark.parametrize(
    ("config", "order"),
    [
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "checkpoint_format": "bitblas"}, "bitblas"),
        ({**GPTQ, "checkpoint_format": "exllama"}, "exllama"),
        ({**GPTQ, "is_marlin_format": True}, "marlin"),
        ({**GPTQ, "quant_method": "marlin"}, "marlin"),
        ({**GPTQ, "quant_method": "gptq_marlin_24"}, "2:4"),
        ({**GPTQ, "quant_method": "gptq_bitblas"}, "bitblas"),
        ({**AWQ, "version": "gemv"}, "awq of version gemv"),
        ({**AWQ, "version": "GEMV_fast"}, "awq of version gemv_fast"),
        ({**AWQ, "quant_method": "awq_marlin", "version": "marlin"}, "awq of version marlin"),
        (SPARSE, "2:4"),
    ],
)
def test_orders_of_kernels_are_refused_by_name(config, order):
    with pytest.raises(ConclaveUnsupportedError) as caught:
        vllm.FusedMoE(4, 2, 64, 64, quant_config=config)
    assert order in str(caught.value).partition(")")[0]
    assert "load the checkpoint that it was made of" in str(caught.value)


@pytest.mark.parametrize("config", [GPTQ, AWQ])
def test_names_of_kernels_over_plain_files_run(config):
    plain = vllm.FusedMoE(4, 2, 64, 64, quant_config=config)
    named = {**config, "quant_method": f"{config['quant_method']}_marlin"}
    other = vllm.FusedMoE(4, 2, 64, 64, quant_config=named)
    shapes = [{k: p.shape for k, p in layer.named_parameters()} for layer in (plain, other)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_of_gate_and_up_in_one_tensor(rank):
    name = "qwen3_moe-modelopt-nvfp4"
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=rank)
    layer, *_ = layer_of(name, moe_parallel_config=split)
    both = torch.arange(128 * 6).reshape(128, 6).remainder(200).float().to(torch.float8_e4m3fn)
    layer.weight_loader(layer.w13_weight_scale, both, "w13_weight_scale", "w1", 2)
    rows = torch.cat([both.float()[32 * rank :][:32], both.float()[64 + 32 * rank :][:32]])
    assert torch.equal(layer.w13_weight_scale[2].float(), rows)


@pytest.mark.parametrize("pattern", ["*.mlp.experts*", "model.layers.0*", "*experts"])
def test_asterisks_leave_layers_out(pattern):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [pattern]}
    layer = vllm.FusedMoE(
        4, 2, 96, 64, quant_config=config, prefix=f"model.layers.0.{len(pattern)}.mlp.experts"
    )
    assert layer.w13_weight.dtype == torch.get_default_dtype()
    other = vllm.FusedMoE(
        4, 2, 96, 64, quant_config={**config, "exclude_modules": ["lm_head", "*.gate"]}
    )
    assert other.w13_weight.dtype == torch.uint8


# Codes that are made when weights are loaded.


def plain_experts(seed):
    numbers = torch.Generator().manual_seed(seed)
    w13 = torch.randn(4, 128, 96, generator=numbers) / 10
    w2 = torch.randn(4, 96, 64, generator=numbers) / 8
    w13[1, 64:] = 0
    return w13.bfloat16(), w2.bfloat16()


def decoded(codes, values, largest, by_row):
    """The scale and the codes by the rule, in float64."""
    axes = (1,) if by_row else (0, 1)
    amax = values.float().abs().amax(axes, keepdim=True)
    step = torch.where(amax > 0, amax / largest, 1.0)
    exact = values.float() / step
    rounded = exact.round() if largest == 127 else exact.to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), rounded.float())
    return codes.double() * step.double()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("method", ["fp8", "experts_int8"])
def test_weights_become_codes_when_they_are_loaded(method, tp_size):
    w13, w2 = plain_experts(5)
    int8 = method == "experts_int8"
    config = {"quant_method": method, "is_checkpoint_fp8_serialized": False}
    numbers = torch.Generator().manual_seed(6)
    hidden = torch.randn(7, 96, generator=numbers)
    ids = torch.stack([torch.randperm(4, generator=numbers)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=numbers)
    total, exact = torch.zeros(7, 96, dtype=torch.float64), []
    plain = torch.zeros(7, 96, dtype=torch.float64)
    for rank in range(tp_size):
        layer = vllm.FusedMoE(
            4,
            2,
            96,
            64,
            params_dtype=torch.bfloat16,
            quant_config=config,
            custom_routing_function=lambda **_: (weights, ids),
            moe_parallel_config=vllm.FusedMoEParallelConfig(tp_size=tp_size, tp_rank=rank),
        )
        for expert in range(4):
            for shard, source in (("w1", w13[expert, :64]), ("w3", w13[expert, 64:])):
                layer.weight_loader(layer.w13_weight, source, "w13_weight", shard, expert)
            layer.weight_loader(layer.w2_weight, w2[expert], "w2_weight", "w2", expert)
        size = 64 // tp_size
        part = slice(size * rank, size * rank + size)
        largest = 127 if int8 else 448
        halves = [
            [
                decoded(codes, values, largest, int8)
                for codes, values in (
                    (layer.w13_weight[e, :size], w13[e, :64][part]),
                    (layer.w13_weight[e, size:], w13[e, 64:][part]),
                )
            ]
            for e in range(4)
        ]
        exact1 = torch.stack([torch.cat(pair) for pair in halves])
        exact2 = torch.stack(
            [decoded(layer.w2_weight[e], w2[e][:, part], largest, int8) for e in range(4)]
        )
        out = layer(hidden, torch.zeros(7, 4))
        total += out
        if int8:
            expected = expected_output(hidden, exact1, exact2, ids, weights)
            assert worst_error(out, expected) <= FLOAT32_BAR
            exact.append(expected)
        plain += torch.tensor(
            expected_output(
                hidden,
                torch.cat([w13[:, :64][:, part], w13[:, 64:][:, part]], 1).float(),
                w2[:, :, part].float(),
                ids,
                weights,
            )
        )
    # Steps of e4m3 are 1/16 of a value at most, of weights and of rows; those of int8 1/127.
    assert worst_error(total, plain) <= (0.02 if int8 else 0.08)


def test_what_is_made_at_loading_has_dynamic_rows():
    config = {
        "quant_method": "fp8",
        "is_checkpoint_fp8_serialized": False,
        "activation_scheme": "static",
    }
    with pytest.raises(ConclaveUnsupportedError, match="is_checkpoint_fp8_serialized"):
        vllm.FusedMoE(4, 2, 96, 64, quant_config=config)


def test_biases_of_packed_experts_are_added():
    name = "qwen3_moe-gptq-int4-group32"
    layer, hidden, _ = layer_of(name, has_bias=True)
    load(layer, name)
    logits = logits_for(layer, hidden)
    without = layer(hidden, logits)
    bias = torch.linspace(-1, 1, 4 * 96).reshape(4, 96)
    for expert in range(4):
        layer.weight_loader(layer.w2_bias, bias[expert], "w2_bias", "w2", expert)
    _, ids, weights, _ = golden_of(name)
    added = (weights[:, :, None].double() * bias[ids.long()].double()).sum(1)
    assert worst_error(layer(hidden, logits), without.double() + added) <= FLOAT32_BAR
    layer.weight_loader(layer.w13_bias, torch.ones(64), "w13_bias", "w3", 0)
    assert not torch.equal(layer(hidden, logits), without)


def test_flat_codes_have_the_first_in_the_upper_half():
    stored = torch.arange(24, dtype=torch.uint8) * 37
    codes = unpack_flat(stored, 4)
    assert codes.shape == (4, 12)
    assert codes[0, :2].tolist() == [int(stored[0]) >> 4, int(stored[0]) & 15]
    assert torch.equal(pack_flat(codes.flatten()), stored)
