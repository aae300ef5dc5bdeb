"""Checkpoints of every quantised format, against recorded float64 of the weights as the format's
own package reads them."""

from __future__ import annotations

import json
import pathlib

import numpy
import pytest

import conclave
from support import safetensors
from support.problems import FLOAT32_BAR, HALF_BAR, expected_output, worst_error

pytestmark = pytest.mark.usefixtures("float32_products")

TESTDATA = pathlib.Path(__file__).parents[2] / "testdata"
METHODS = sorted(path.parent.name for path in (TESTDATA / "quantised").glob("*/config.json"))
GGUF = sorted(path.parent.name for path in (TESTDATA / "gguf").glob("*/reference.safetensors"))
# ModelOpt's AWQ scales the columns of its inputs, which layers do not.


def bar_of(spec: conclave.MoeSpec) -> float:
    """Rows that become codes are judged as 16-bit ones; all else is float32."""
    plain = spec.quant.activations == "none" and spec.weight_dtype != "bfloat16"
    return FLOAT32_BAR if plain else HALF_BAR


def golden_of(name: str) -> tuple[numpy.ndarray, dict[str, numpy.ndarray], numpy.ndarray]:
    golden = safetensors.read(TESTDATA / "quantised" / name / "golden.safetensors")
    routing = {key: golden[key] for key in ("topk_ids", "topk_weights")}
    return golden["hidden_states"], routing, golden["float64.output"]


def config_with_method(folder: pathlib.Path) -> str:
    """config.json, with what ModelOpt may keep in a file of its own."""
    config = json.loads((folder / "config.json").read_text())
    beside = folder / "hf_quant_config.json"
    if beside.is_file():
        method = json.loads(beside.read_text())
        config["quantization_config"] = {"quant_method": "modelopt", **method}
    return json.dumps(config)


def test_there_are_all_of_them():
    assert len(METHODS) >= 87 and len(GGUF) >= 22


@pytest.mark.parametrize("name", METHODS)
def test_a_method_matches_float64(name):
    folder = TESTDATA / "quantised" / name
    info = conclave.inspect(folder).layers[0]
    assert info.supported, info.reason
    layer = conclave.Layer.from_checkpoint(folder, info.index)
    assert layer.spec == info.spec
    hidden, routing, expected = golden_of(name)
    out = layer(hidden, **routing)
    assert worst_error(out, expected) <= bar_of(layer.spec)
    one = {key: array[4:5] for key, array in routing.items()}
    numpy.testing.assert_array_equal(layer(hidden[4:5], **one), out[4:5])


@pytest.mark.parametrize("name", METHODS)
def test_a_feed_of_a_method_gives_the_same_bits(name, torch):
    """Tensors of torch, in a random order, with the types that they have in the file."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder = TESTDATA / "quantised" / name
    feed = conclave.Feed(config_with_method(folder))
    tensors = list(load_file(folder / "model.safetensors").items())
    numpy.random.default_rng(3).shuffle(tensors)
    for key, tensor in tensors:
        feed.put(key, tensor)
    index = feed.layers[0]
    assert feed.is_complete(index), feed.missing()
    hidden, routing, _ = golden_of(name)
    fed = conclave.Layer.from_checkpoint(feed, index)
    read = conclave.Layer.from_checkpoint(folder, index)
    assert fed.spec == read.spec
    numpy.testing.assert_array_equal(fed(hidden, **routing), read(hidden, **routing))
    fed.reload(folder, index)
    numpy.testing.assert_array_equal(fed(hidden, **routing), read(hidden, **routing))


@pytest.mark.parametrize("name", METHODS)
def test_ranks_of_a_method_add_up(name):
    """Experts over two ranks, and slices of their columns where rows do not depend on slices."""
    folder = TESTDATA / "quantised" / name
    index = conclave.inspect(folder).layers[0].index
    hidden, routing, expected = golden_of(name)
    whole = conclave.Layer.from_checkpoint(folder, index)
    kinds = [("ep_size", "ep_rank")]
    if whole.spec.quant.activations in ("none", "tensor_static"):
        kinds.append(("tp_size", "tp_rank"))
    for size, rank in kinds:
        total = numpy.zeros_like(expected)
        for i in range(2):
            parallel = {size: 2, rank: i, "reduce": "partial"}
            layer = conclave.Layer.from_checkpoint(folder, index, parallel=parallel)
            total += layer(hidden, **routing)
        assert worst_error(total, expected) <= bar_of(whole.spec), size


def first_part(name: str) -> pathlib.Path:
    files = sorted((TESTDATA / "gguf" / name).glob("*.gguf"))
    return files[0]


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_model_matches_float64(name):
    """Routed by the layers' own gates."""
    checkpoint = conclave.Checkpoint(first_part(name))
    reference = safetensors.read(TESTDATA / "gguf" / name / "reference.safetensors")
    layers = checkpoint.info.layers
    assert layers and all(info.supported for info in layers)
    for info in layers:
        key = f"layers.{info.index}."
        layer = conclave.Layer.from_checkpoint(checkpoint, info.index)
        ids = numpy.empty_like(reference[key + "topk_ids"])
        arguments = {}
        if key + "token_ids" in reference:
            arguments["token_ids"] = reference[key + "token_ids"]
        out = layer(reference[key + "hidden"], captured_ids=ids, **arguments)
        numpy.testing.assert_array_equal(ids, reference[key + "topk_ids"])
        assert worst_error(out, reference[key + "output"]) <= bar_of(layer.spec)


# Block types of a file that experts of their own hold, small enough to make here.
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16"]


def write_model(path, kind, random):
    """A llama model of one layer, written by gguf-py; the values that it reads from it."""
    gguf = pytest.importorskip("gguf")
    experts, hidden, inner = 5, 96, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    quant = getattr(gguf.GGMLQuantizationType, kind)
    exact = {}
    for name, rows, cols in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        values = (random.standard_normal((experts, rows, cols)) / cols**0.5).astype("float32")
        codes = gguf.quants.quantize(values, quant)
        exact[name] = gguf.quants.dequantize(codes, quant).astype("float64")
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", codes, raw_dtype=quant)
    router = random.standard_normal((experts, hidden)).astype("float32")
    writer.add_tensor("blk.0.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.mark.parametrize("kind", TYPES)
def test_a_gguf_file_of_gguf_py_matches_float64(kind, tmp_path):
    random = numpy.random.default_rng(11)
    path = tmp_path / "model.gguf"
    exact = write_model(path, kind, random)
    layer = conclave.Layer.from_checkpoint(path, 0)
    hidden = random.standard_normal((7, 96)).astype("float32")
    ids = numpy.stack([random.permutation(5)[:2] for _ in range(7)]).astype("int32")
    shares = random.random((7, 2)).astype("float32")
    expected = expected_output(
        hidden, numpy.concatenate([exact["gate"], exact["up"]], 1), exact["down"], ids, shares
    )
    out = layer(hidden, topk_ids=ids, topk_weights=shares)
    assert worst_error(out, expected) <= FLOAT32_BAR


@pytest.mark.parametrize(
    ("name", "rows", "rule"),
    [
        ("qwen3_moe-compressed-mxfp4-rows", "float4_e2m1fn_x2", "even_power"),
        ("qwen3_moe-compressed-mxfp8-rows", None, "half_power"),
        ("qwen3_moe-compressed-nvfp4-rows", "float4_e2m1fn_x2", "two_level"),
        ("qwen3_moe-modelopt-nvfp4", "float4_e2m1fn_x2", "two_level"),
    ],
)
def test_rows_of_small_floats_can_be_left_as_they_are(name, rows, rule):
    folder = TESTDATA / "quantised" / name
    layer = conclave.Layer.from_checkpoint(folder, 0)
    assert layer.spec.quant.activation_scale_rule == rule
    assert layer.spec.quant.activation_dtype == rows
    plain = conclave.Layer.from_checkpoint(folder, 0, plain_rows=True)
    assert plain.spec.quant.activations == "none"
    assert plain.spec.quant == layer.spec.with_plain_rows().quant
    hidden, routing, expected = golden_of(name)
    hidden = numpy.asarray(hidden, dtype="float32")
    coded = layer.forward(hidden, **routing)
    assert worst_error(coded, expected) <= HALF_BAR
    assert worst_error(plain.forward(hidden, **routing), expected) > 2 * HALF_BAR
