"""conclave.Feed of GGUF models, pushed as gguf-py reads them: against layers of the same files."""

from __future__ import annotations

import pathlib
import random

import numpy
import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

import conclave  # noqa: E402
from conclave.errors import Error  # noqa: E402

TESTDATA = pathlib.Path(__file__).parents[2] / "testdata" / "gguf"
MODELS = sorted(path.parent.name for path in TESTDATA.glob("*/reference.safetensors"))


def parts_of(model: str) -> list[pathlib.Path]:
    return sorted((TESTDATA / model).glob("*.gguf"))


def keys_alone(path: pathlib.Path, folder: pathlib.Path) -> bytes:
    """A file of the same keys without tensors, as gguf-py writes it."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "keys.gguf", architecture)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return (folder / "keys.gguf").read_bytes()


def run(layer, spec):
    source = numpy.random.default_rng(5)
    hidden = source.standard_normal((5, spec.hidden_size)).astype("float32")
    arguments = {}
    if spec.router.name == "hash":
        arguments["token_ids"] = source.integers(0, spec.router.vocab_size, 5).astype("int32")
    return layer(hidden, **arguments)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "keys"])
@pytest.mark.parametrize("model", MODELS)
def test_what_gguf_reads_makes_the_layers_of_the_file(model, listed, tmp_path):
    readers = [gguf.GGUFReader(path) for path in parts_of(model)]
    if listed:
        feed = conclave.Feed(
            gguf=readers[0].data, gguf_parts=[reader.data for reader in readers[1:]]
        )
    else:
        feed = conclave.Feed(gguf=keys_alone(parts_of(model)[0], tmp_path))
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    random.Random(7).shuffle(tensors)
    tensors.sort(key=lambda tensor: "_latent_" not in tensor.name)
    used = [feed.put(tensor.name, tensor.data, tensor.tensor_type) for tensor in tensors]
    assert any(used) and feed.missing() == []
    info = conclave.inspect(parts_of(model)[0])
    assert feed.layers == tuple(layer.index for layer in info.layers)
    for expected in info.layers:
        assert feed.layer(expected.index) == expected
        layer = conclave.Layer.from_checkpoint(feed, expected.index)
        whole = conclave.Layer.from_checkpoint(parts_of(model)[0], expected.index)
        out = run(whole, expected.spec)
        numpy.testing.assert_array_equal(run(layer, expected.spec), out)
        layer.reload(feed, expected.index)
        numpy.testing.assert_array_equal(run(layer, expected.spec), out)
    feed.release(info.layers[0].index)
    assert not feed.is_complete(info.layers[0].index)


def test_bytes_values_and_names_of_types():
    path = parts_of("qwen3moe-q4_k_m")[0]
    reader = gguf.GGUFReader(path)
    feed = conclave.Feed(gguf=path.read_bytes())
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        kind = tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.F32:
            feed.put(tensor.name, tensor.data)
        else:
            feed.put(tensor.name, tensor.data.tobytes(), kind.name, shape)
    assert feed.missing() == []
    spec = feed.layer(0).spec
    expected = run(conclave.Layer.from_checkpoint(path, 0), spec)
    numpy.testing.assert_array_equal(run(conclave.Layer.from_checkpoint(feed, 0), spec), expected)


def test_wrong_tensors_are_named():
    path = parts_of("qwen3moe-q4_k_m")[0]
    reader = gguf.GGUFReader(path)
    feed = conclave.Feed(gguf=reader.data)
    name = "blk.0.ffn_up_exps.weight"
    (up,) = [tensor for tensor in reader.tensors if tensor.name == name]
    rows = numpy.array(up.data)
    for arguments, text in (
        ((rows, 77), "77"),
        ((rows, -1), "-1"),
        ((rows, 2**70), str(2**70)),
        ((rows, 12.5), "12.5"),
        ((rows, "Q4_X"), "Q4_X"),
        ((rows, 31), "Q4_0_4_4"),
        ((rows[..., :-1], up.tensor_type), "dense"),
        ((numpy.ascontiguousarray(rows[..., :-1]), up.tensor_type), "rows of bytes"),
        ((rows[:1], up.tensor_type), "list"),
        ((rows, "Q6_K", up.shape[::-1]), "bytes of Q6_K"),
        ((rows, up.tensor_type, up.shape), "row"),
        ((rows, up.tensor_type, [2] * 9), "dimensions"),
    ):
        with pytest.raises(Error, match=name) as error:
            feed.put(name, *arguments)
        assert text in str(error.value), str(error.value)
    assert feed.put(name, rows, up.tensor_type)
    with pytest.raises(Error, match="put before"):
        feed.put(name, rows, up.tensor_type)
    assert not feed.put("blk.0.attn_q.weight", rows, up.tensor_type)
    with pytest.raises(TypeError, match="shape"):
        feed.put(name, rows, shape=[1])
    with pytest.raises(TypeError, match="gguf"):
        conclave.Feed("{}", gguf=reader.data)
    with pytest.raises(TypeError, match="quantization"):
        conclave.Feed(gguf=reader.data, quantization={})
    with pytest.raises(Error, match="header"):
        conclave.Feed(gguf=reader.data[:100])
    with pytest.raises(Error, match="uint8"):
        conclave.Feed(gguf=numpy.zeros((2, 2), "float32"))
    directory = conclave.Feed(
        spec={
            **conclave.spec.to_dict(conclave.inspect(path).layers[0].spec),
            "weight_dtype": "bfloat16",
            "quant": {},
        },
        model_type="qwen3_moe",
        layers=[0],
    )
    with pytest.raises(Error, match="model directory"):
        directory.put(name, rows, up.tensor_type)
