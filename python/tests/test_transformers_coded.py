"""Models of transformers whose experts modules hold codes, against its own dequantised weights."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from conclave.transformers import _packed, _traits  # noqa: E402
from support.coded import Coder, in_pairs, spread, table  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    fp8_rows,
    quantise_weights,
    worst_quantised_error,
)

pytestmark = pytest.mark.usefixtures("float32_products")

E, K, T = 5, 2, 9


# Fine-grained float8 with experts of fp4.


FLOAT8_FIELDS = SimpleNamespace(
    hidden_size=192,
    moe_intermediate_size=128,
    num_local_experts=E,
    hidden_act="silu",
    hidden_activation="silu",
)


def fp4_experts(scale_fmt: str) -> Any:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    try:
        module = fp8.FP8Experts(
            FLOAT8_FIELDS, block_size=(128, 128), expert_dtype="fp4", scale_fmt=scale_fmt
        )
    except TypeError:
        pytest.skip("this version has no fp4 experts")
    return fp8, module


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp4_experts_equal_their_dequantised_weights(scale_fmt: str) -> None:
    fp8, module = fp4_experts(scale_fmt)
    coder, exact = Coder(4), []
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
            shape = (E, weight.shape[1], 2 * weight.shape[2])
            codes = coder.whole(0, 16, shape).to(torch.uint8)
            weight.copy_(in_pairs(codes).view(torch.int8))
            step = torch.exp2(coder.whole(-6, -3, tuple(scale.shape)).float())
            if scale_fmt == "float":
                step *= coder.uniform(*scale.shape)
            scale.copy_(step)
            exact.append(table(4, 1)[codes.long()] * spread(scale.float(), shape[2], 32))
    numbers = seeded(2)
    hidden = torch.randn(T, 192, generator=numbers).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=numbers)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=numbers)
    with torch.no_grad():
        actual = fp8.ALL_FP8_EXPERTS_FUNCTIONS["conclave"](module, hidden, ids, weights)
    spec = _packed.packed_experts(module, 192).layer.spec  # type: ignore[union-attr]
    assert spec.weight_dtype == "float4_e2m1fn_x2"
    assert (spec.hidden_size, spec.intermediate_size) == (192, 128)
    powers = scale_fmt == "ue8m0"
    assert spec.quant.power_of_two_scales == powers and spec.quant.activations == "group"

    def rows(values: Any) -> Any:
        return in_powers_of_two(values) if powers else fp8_rows(values, 128)

    error = worst_quantised_error(actual, hidden, *exact, weights, ids, quantise=rows)
    assert error <= 6e-3


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (16, 48)], ids=str)
def test_float8_experts_of_any_blocks(block: tuple[int, int]) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    module, numbers, exact = fp8.FP8Experts(FLOAT8_FIELDS, block_size=block), seeded(4), []
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            codes, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
            values = torch.randn(codes.shape, generator=numbers) / codes.shape[2] ** 0.5
            found, scales, values = quantise_weights(values, "block", block)
            codes.copy_(found)
            scale.copy_(scales)
            exact.append(values)
    hidden = torch.randn(T, 192, generator=numbers).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=numbers)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=numbers)
    with torch.no_grad():
        actual = fp8.ALL_FP8_EXPERTS_FUNCTIONS["conclave"](module, hidden, ids, weights)
    spec = _packed.packed_experts(module, 192).layer.spec  # type: ignore[union-attr]
    assert spec.quant.activation_group == block[1]
    error = worst_quantised_error(
        actual, hidden, *exact, weights, ids, quantise=lambda rows: fp8_rows(rows, block[1])
    )
    assert error <= 6e-3


def in_powers_of_two(values: Any) -> Any:
    """e4m3 codes of groups of 128 columns whose scales are rounded up to powers of two."""
    found = []
    for group in values.float().split(128, dim=1):
        amax = group.abs().amax(1, keepdim=True)
        step = torch.exp2(torch.ceil(torch.log2(amax / 448)))
        step = torch.where(amax > 0, step, 1.0)
        found.append((group / step).to(torch.float8_e4m3fn).double() * step.double())
    return torch.cat(found, 1)


def test_fp4_experts_with_static_rows_are_not_ours() -> None:
    module = SimpleNamespace(activation_scheme="static", block_size=None)
    with pytest.raises(_traits.NotOurs, match="static"):
        _traits._quant_of(module, torch.ones(1), is_fp4=True)


# Experts of gpt-oss in mxfp4, in the order of Triton's kernels, in a block that calls them with ids
# and weights. test_transformers_mxfp4.py has the blocks that transformers puts around them.


class Layout:
    """As the layouts of the kernels: columns first, and here bytes in another order."""

    def swizzle_data(self, data: Any) -> Any:
        return data.flip(-2)

    def unswizzle_data(self, data: Any) -> Any:
        return data.flip(-2)


def stored(by_rows: Any) -> Any:
    """A tensor of the kernels, of [E, rows, bytes]."""
    layout = Layout()
    data = layout.swizzle_data(by_rows.transpose(-1, -2)).contiguous()
    return SimpleNamespace(storage=SimpleNamespace(data=data, layout=layout))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.1)
    return model


def in_mxfp4(model: Any) -> Any:
    """The model with random packed experts, and in the given one what transformers makes of
    them."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed = copy.deepcopy(model)
    coder = Coder(8)
    for layer, own in zip(packed.model.layers, model.model.layers, strict=True):
        module = mxfp4.Mxfp4GptOssExperts(packed.config)
        for part in ("gate_up_proj", "down_proj"):
            # Blocks of 16 bytes have an axis of their own in the oldest versions.
            rows, half = getattr(module, part).flatten(2).shape[1:]
            codes = in_pairs(coder.whole(0, 16, (4, rows, 2 * half)).to(torch.uint8))
            scales = coder.whole(122, 125, (4, rows, half // 16)).to(torch.uint8)
            del module._parameters[part]
            setattr(module, part, stored(codes))
            precision = SimpleNamespace(weight_scale=stored(scales))
            setattr(module, f"{part}_precision_config", precision)
            blocks = codes.unflatten(-1, (-1, 16))
            exact = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            with torch.no_grad():
                getattr(own.mlp.experts, part).copy_(exact)
                bias = getattr(own.mlp.experts, f"{part}_bias")
                getattr(module, f"{part}_bias").copy_(bias)
        layer.mlp.experts = module
    return packed


def check_experts(packed: Any, model: Any) -> None:
    """Each module of packed experts in a forward of its model, against the values in float64 on
    what it was called with: routers and attention between are torch's."""
    calls: dict[int, Any] = {}

    def keep(index: int) -> Any:
        def hook(_: Any, given: Any, named: Any, out: Any) -> None:
            calls[index] = (given, named, out)

        return hook

    hooks = [
        layer.mlp.experts.register_forward_hook(keep(index), with_kwargs=True)
        for index, layer in enumerate(packed.model.layers)
    ]
    logits(packed)
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(model.model.layers):
        given, named, out = calls[index]
        exact = copy.deepcopy(layer.mlp.experts).double()
        exact.config._experts_implementation = "eager"  # grouped products have no float64
        with torch.no_grad():
            expected = exact(*map(wide, given), **{key: wide(x) for key, x in named.items()})
        rows = expected.flatten(0, -2)
        assert worst_error(out.flatten(0, -2), rows) <= FLOAT32_BAR, index


def wide(value: Any) -> Any:
    is_rows = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_rows else value


def logits(model: Any) -> Any:
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


def test_packed_gpt_oss_equals_its_dequantised_model() -> None:
    model = gpt_oss()
    packed = in_mxfp4(model)
    report = library.patch(packed)
    assert [m.replaced for m in report.modules] == ["experts", "experts"], str(report)
    check_experts(packed, model)
    calls = library.backend_report(packed)
    assert len(calls.ours) == 2 and not calls.fell_back, str(calls)
    layer = _packed.packed_experts(packed.model.layers[0].mlp.experts, 64).layer
    assert layer is not None and layer.spec.weight_dtype == "float4_e2m1fn_x2"
    # Bytes of codes, not of values: written to, they are packed again.
    with torch.no_grad():
        for one in (packed, model):
            one.model.layers[1].mlp.experts.down_proj_bias.add_(1)
        packed.model.layers[0].mlp.experts.down_proj.storage.data.zero_()
        model.model.layers[0].mlp.experts.down_proj.zero_()
    check_experts(packed, model)
    library.unpatch(packed)


def test_packed_gpt_oss_that_is_not_loaded_says_so() -> None:
    packed = in_mxfp4(gpt_oss())
    packed.model.layers[1].mlp.experts.down_proj_precision_config = None
    report = library.patch(packed)
    assert [m.replaced for m in report.modules] == ["experts", ""]
    assert "down_proj_precision_config is not loaded" in report.not_replaced[0].reason
    library.unpatch(packed)


@pytest.mark.parametrize("release", [False, True])
def test_packed_gpt_oss_keeps_its_codes(release: bool) -> None:
    """There is no parameter that could be freed."""
    packed = in_mxfp4(gpt_oss())
    library.patch(packed, release=release)
    first = logits(packed)
    assert torch.equal(logits(packed), first)
    data = packed.model.layers[0].mlp.experts.gate_up_proj.storage.data
    assert data.numel() == 4 * 192 * 32


def test_the_backend_does_not_reach_packed_gpt_oss() -> None:
    from conclave.errors import ConclaveUnsupportedError

    with pytest.raises(ConclaveUnsupportedError, match=r"Mxfp4GptOssExperts.*patch"):
        library.set_implementation(in_mxfp4(gpt_oss()))


def test_blocks_of_gguf_files_say_why_not() -> None:
    utils = pytest.importorskip("transformers.integrations.gguf.utils")
    if not hasattr(utils, "GgufExperts"):
        pytest.skip("this version has no experts of GGUF blocks")
    model = gpt_oss()
    q8_0 = 8
    for layer in model.model.layers:
        layer.mlp.experts = utils.GgufExperts(4, 64, 96, q8_0, q8_0, torch.nn.SiLU())
    report = library.patch(model)
    assert not [m for m in report.modules if m.replaced]
    assert all("GGUF" in m.reason and "from_checkpoint" in m.reason for m in report.modules)
    assert math.isfinite(report.packed_bytes) and len(library.backend_report(model).ours) == 0
