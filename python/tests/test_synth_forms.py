"""Random models of every form that files have: read back, their weights are what the format's own
package decodes, or numpy by its definition, to the bit."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy
import pytest

from support import safetensors
from support.converted import convert, synth
from support.packed_words import decode_awq, decode_gptq

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

EXPERTS, SIZE = 3, 256
SIZES = ("-E", str(EXPERTS), "-k", "2", "-H", str(SIZE), "-I", str(SIZE))
PREFIX = "model.layers.0.block_sparse_moe."
# Matrices by their names in directories, and in GGUF files.
MATRICES = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def make(folder: pathlib.Path, form: str) -> pathlib.Path:
    return synth(folder / "model", *SIZES, "--model-type", "mixtral", "--dtype", form)


def as_read(model: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """The values of stacks that the library reads, by the matrices' names in directories."""
    out = convert(model, folder / "values.gguf", "q8_0", keep="*=f32") / "model.gguf"
    stacks = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors}
    return {short: stacks[f"blk.0.{name}.weight"] for short, name in MATRICES.items()}


def check(model: pathlib.Path, folder: pathlib.Path, decode: Any) -> None:
    """decode(tensors, name of a linear layer): its values, float32."""
    tensors = safetensors.read(model / "model.safetensors")
    for short, stack in as_read(model, folder).items():
        for expert in range(EXPERTS):
            values = decode(tensors, f"{PREFIX}experts.{expert}.{short}")
            assert numpy.abs(values).max() > 0
            numpy.testing.assert_array_equal(stack[expert], values)


@pytest.mark.parametrize("form", ["", ":group=32,asym", "-act-order:group=64,asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path: pathlib.Path, bits: int, form: str) -> None:
    model = make(tmp_path, f"gptq-int{bits}{form}")
    check(model, tmp_path, lambda tensors, name: decode_gptq(tensors, name, bits))
    groups = safetensors.read(model / "model.safetensors")[f"{PREFIX}experts.0.w1.g_idx"]
    neighbours = (groups == numpy.arange(SIZE) // (SIZE // (groups.max() + 1))).all()
    assert neighbours == ("act-order" not in form)
    assert (numpy.bincount(groups) == SIZE // (groups.max() + 1)).all()


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(tmp_path: pathlib.Path, group: int, version: str) -> None:
    model = make(tmp_path, f"awq-int4:group={group},{version}")
    check(model, tmp_path, lambda tensors, name: decode_awq(tensors, name, group, version))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("codes", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(tmp_path: pathlib.Path, codes: str, nested: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.functional import QuantState, dequantize_4bit

    def decode(tensors: dict[str, Any], name: str) -> Any:
        name += ".weight"
        state = {
            key.removeprefix(f"{name}."): torch.tensor(value)
            for key, value in tensors.items()
            if key.startswith(f"{name}.")
        }
        state = QuantState.from_dict(state, torch.device("cpu"))
        assert (state.quant_type, state.nested) == (codes, nested)
        state.dtype = torch.float32
        return dequantize_4bit(torch.tensor(tensors[name]), state).numpy()

    check(make(tmp_path, f"bnb-{codes}" + ":nested" * nested), tmp_path, decode)


def test_bitsandbytes_8_bits(tmp_path: pathlib.Path) -> None:
    """The package multiplies with the largest value and with a rounded 1 / 127, two roundings of a
    scale that is rounded once here."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.functional import int8_vectorwise_dequant

    model = make(tmp_path, "bnb-int8")
    tensors = safetensors.read(model / "model.safetensors")
    for short, stack in as_read(model, tmp_path).items():
        for expert in range(EXPERTS):
            name = f"{PREFIX}experts.{expert}.{short}"
            codes, largest = tensors[f"{name}.weight"], tensors[f"{name}.SCB"]
            assert tensors[f"{name}.weight_format"] == 0
            scales = largest / numpy.float32(127)
            numpy.testing.assert_array_equal(stack[expert], codes * scales[:, None])
            theirs = int8_vectorwise_dequant(torch.tensor(codes), torch.tensor(largest)).numpy()
            numpy.testing.assert_allclose(stack[expert], theirs, rtol=3 * 2.0**-23, atol=0)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(tmp_path: pathlib.Path, bits: int, group: int) -> None:
    core = pytest.importorskip("mlx.core", reason="mlx is not installed")
    core.set_default_device(core.cpu)
    model = make(tmp_path, f"mlx-int{bits}:group={group}")
    tensors = safetensors.read(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"]) == (bits, group)
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for short, stack in as_read(model, tmp_path).items():
        name = f"{PREFIX}switch_mlp.{names[short]}"
        parts = (core.array(tensors[f"{name}.{part}"]) for part in ("scales", "biases"))
        words = core.array(tensors[f"{name}.weight"].view(numpy.uint32))
        values = core.dequantize(words, *parts, group_size=group, bits=bits)
        assert values.dtype == core.float32
        numpy.testing.assert_array_equal(stack, numpy.array(values))


BLOCKS = "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl mxfp4 bf16 f16 f32".split()


@pytest.mark.parametrize("form", BLOCKS)
def test_gguf(tmp_path: pathlib.Path, form: str) -> None:
    model = synth(tmp_path / "model.gguf", *SIZES, "--model-type", "mixtral", "--dtype", form)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model / "model.gguf").tensors}
    values = safetensors.read(
        convert(model / "model.gguf", tmp_path / "values", "f32") / "model.safetensors"
    )
    for short, name in MATRICES.items():
        found = tensors[f"blk.0.{name}.weight"]
        assert found.tensor_type.name.lower() == form
        decoded = gguf.dequantize(found.data, found.tensor_type)
        assert decoded.shape == (EXPERTS, SIZE, SIZE) and numpy.abs(decoded).max() > 0
        for expert in range(EXPERTS):
            numpy.testing.assert_array_equal(
                values[f"{PREFIX}experts.{expert}.{short}.weight"], decoded[expert]
            )
