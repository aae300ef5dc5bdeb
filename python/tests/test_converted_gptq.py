"""Models that become GPTQ's words: numpy decodes them, and GPTQModel where it is installed; layers
compute what the decoded weights say."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy
import pytest

import conclave
from support import safetensors
from support.converted import convert, synth
from support.packed_words import decode_gptq
from support.problems import FLOAT32_BAR, expected_output, worst_error

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402

GPTQ_FORMS = [f"gptq-int{bits}:group=32{zeros}" for bits in (2, 3, 4, 8) for zeros in ("", ",asym")]


def convert_to_gptq(folder: pathlib.Path, form: str) -> tuple[pathlib.Path, pathlib.Path, int]:
    """A model of one layer, what it becomes, and the bits of a code."""
    sizes = ["-E", "4", "-k", "2", "-H", "128", "-I", "64", "--model-type", "mixtral"]
    source = synth(folder / "model", *sizes)
    return source, convert(source, folder / "gptq", form), int(form[len("gptq-int")])


@pytest.mark.parametrize("form", GPTQ_FORMS)
def test_gptq_words_are_those_of_their_package(tmp_path: pathlib.Path, form: str) -> None:
    """Decoded by numpy from the format's definition, and by GPTQModel if it is there."""
    source, out, bits = convert_to_gptq(tmp_path, form)
    tensors = safetensors.read(out / "model.safetensors")
    values = safetensors.read(next(source.glob("*.safetensors")))
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    decoded = decode_gptq(tensors, name, bits)
    wanted = numpy.asarray(values[f"{name}.weight"], numpy.float32)
    assert decoded.shape == wanted.shape
    steps = tensors[f"{name}.scales"].astype(numpy.float32)[tensors[f"{name}.g_idx"]].T
    # Half a step of rounding, and as much for a zero point that is rounded too. A scale of float16
    # is off by 2^-11, so that the largest code is by at most 127 of that.
    limit = ((1 if "asym" in form else 0.5) + 127 * 2.0**-11) * steps
    assert (numpy.abs(decoded - wanted) <= limit).all()
    pytest.importorskip("gptqmodel", reason="GPTQModel is not installed")
    numpy.testing.assert_array_equal(decoded, decode_by_gptqmodel(tensors, name, bits))


def decode_by_gptqmodel(tensors: dict[str, Any], name: str, bits: int) -> Any:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    columns, rows = len(tensors[f"{name}.g_idx"]), tensors[f"{name}.scales"].shape[1]
    layer = TorchLinear(
        bits=bits,
        group_size=32,
        sym=False,
        desc_act=False,
        in_features=columns,
        out_features=rows,
        bias=False,
        format=FORMAT.GPTQ_V2,
    )
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensor = torch.from_numpy(tensors[f"{name}.{part}"].copy())
        layer.register_buffer(part, tensor.to(torch.float32) if part == "scales" else tensor)
    convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    return layer.dequantize_weight().T.numpy()


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("form", GPTQ_FORMS)
def test_gptq_layers_match_float64(tmp_path: pathlib.Path, form: str) -> None:
    """The layer of the checkpoint, and `FusedMoE` fed with the tensors of experts."""
    _, out, bits = convert_to_gptq(tmp_path, form)
    tensors = safetensors.read(out / "model.safetensors")
    prefix = "model.layers.0.block_sparse_moe.experts"
    w1, w2, w3 = (
        numpy.stack([decode_gptq(tensors, f"{prefix}.{e}.{part}", bits) for e in range(4)])
        for part in ("w1", "w2", "w3")
    )
    rng = numpy.random.default_rng(17)
    hidden = rng.standard_normal((9, 128)).astype(numpy.float32)
    ids = numpy.stack([rng.permutation(4)[:2] for _ in range(9)]).astype(numpy.int32)
    shares = rng.random((9, 2)).astype(numpy.float32)
    expected = expected_output(hidden, numpy.concatenate([w1, w3], 1), w2, ids, shares)

    layer = conclave.Layer.from_checkpoint(out, 0)
    assert worst_error(layer(hidden, topk_ids=ids, topk_weights=shares), expected) <= FLOAT32_BAR

    fused = vllm.FusedMoE(
        4,
        2,
        128,
        64,
        params_dtype=torch.float32,
        quant_config=json.loads((out / "config.json").read_text())["quantization_config"],
        prefix=prefix,
        custom_routing_function=lambda **_: (torch.from_numpy(shares), torch.from_numpy(ids)),
        expert_mapping=vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 4),
    )
    given = {
        name.removeprefix(f"{prefix}."): torch.tensor(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    taken = set(fused.load_weights(given.items()))
    assert len(given) == 4 * 3 * 4 and len(taken) == 2 * 4
    assert worst_error(fused(torch.from_numpy(hidden), torch.zeros(9, 4)), expected) <= FLOAT32_BAR
