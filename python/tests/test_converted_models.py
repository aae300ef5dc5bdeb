"""Converted models in other software: transformers generates the same tokens with and without the
library, and gguf-py reads the blocks."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy
import pytest

import conclave
from support import safetensors
from support.converted import convert, synth

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

import conclave.transformers  # noqa: E402

NEW_TOKENS = 16
PROMPT = [[3, 17, 42, 5, 29, 11, 60, 8]]
HIDDEN, HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 4, 16, 64, 2


def generate(model: Any) -> list[int]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(
            torch.tensor(PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    return out[0].tolist()


def check_tokens(load: Any) -> None:
    """Plain, with the experts backend, and with whole blocks replaced."""
    expected = generate(load())
    assert len(expected) == len(PROMPT[0]) + NEW_TOKENS
    assert len(set(expected[len(PROMPT[0]) :])) > 1, "a constant model would tell nothing"
    backend = load()
    conclave.transformers.set_implementation(backend)
    assert generate(backend) == expected
    report = conclave.transformers.backend_report(backend)
    assert len(report.ours) == LAYERS, report
    patched = load()
    replaced = conclave.transformers.patch(patched)
    assert len(replaced.replaced) == LAYERS, replaced
    assert generate(patched) == expected


def save_gpt_oss(directory: pathlib.Path) -> pathlib.Path:
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        layer_types=["full_attention"] * LAYERS,
        eos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(5)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def test_gpt_oss_stacks_generate_the_same_tokens(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    source = save_gpt_oss(tmp_path / "bf16")
    out = convert(source, tmp_path / "mxfp4", "gpt-oss-mxfp4")
    names = set(safetensors.read(out / "model.safetensors"))
    assert "model.layers.1.mlp.experts.gate_up_proj_blocks" in names
    assert "model.layers.1.mlp.experts.gate_up_proj_bias" in names

    # transformers 5.0 leaves the stacks that it decodes bf16 among float32, and cannot run that;
    # codes times powers of two are the same values in either type.
    def load() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        return model.to(torch.float32)

    # transformers decodes the file as the format's definition says.
    stack = load().model.layers[1].mlp.experts.down_proj.detach().numpy()
    decoded = decode_mxfp4(out, "model.layers.1.mlp.experts.down_proj")
    numpy.testing.assert_array_equal(stack, decoded.transpose(0, 2, 1))
    check_tokens(load)


def decode_mxfp4(model: pathlib.Path, name: str) -> Any:
    """[experts, rows, columns] of blocks of 32 codes, two a byte, the lower half first."""
    tensors = safetensors.read(model / "model.safetensors")
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    codes = numpy.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    table = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], numpy.float32)
    values = numpy.concatenate([table, -table])[codes]
    values *= numpy.exp2(scales.astype(numpy.float32) - 127)[..., None]
    return values.reshape(*blocks.shape[:2], -1)


def write_qwen3_moe(path: pathlib.Path) -> None:
    """A whole model; transformers takes the experts' width from its own default, 768."""
    experts, inner = 4, 768
    rng = numpy.random.default_rng(20261123)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(128)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)

    def add(name: str, *shape: int, spread: float = 0.2) -> None:
        values = spread * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(numpy.float32))

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, numpy.ones(size, numpy.float32))

    add("token_embd.weight", VOCAB, HIDDEN, spread=1.0)
    add("output.weight", VOCAB, HIDDEN)
    ones("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        start = f"blk.{layer}."
        for name, rows, cols in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", 2 * HEAD_DIM, HIDDEN),
            ("attn_v", 2 * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate_inp", experts, HIDDEN),
        ):
            add(f"{start}{name}.weight", rows, cols)
        for name, size in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            ones(f"{start}{name}.weight", size)
        add(f"{start}ffn_gate_exps.weight", experts, inner, HIDDEN)
        add(f"{start}ffn_up_exps.weight", experts, inner, HIDDEN)
        add(f"{start}ffn_down_exps.weight", experts, HIDDEN, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wide(path: pathlib.Path) -> None:
    """One layer of experts alone, with rows of 256 as the widest blocks need them."""
    rng = numpy.random.default_rng(12)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_embedding_length(256)
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    for name, shape in (
        ("gate_inp", (3, 256)),
        ("gate_exps", (3, 256, 256)),
        ("up_exps", (3, 256, 256)),
        ("down_exps", (3, 256, 256)),
    ):
        values = 0.05 * rng.standard_t(5, shape)
        writer.add_tensor(f"blk.0.ffn_{name}.weight", values.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(path: pathlib.Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_qwen3_moe(path)
    return path


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_gguf_files_have_the_bytes_of_gguf_py(
    qwen3_moe: pathlib.Path, tmp_path: pathlib.Path, form: str
) -> None:
    before = tensors_of(qwen3_moe)
    after = tensors_of(convert(qwen3_moe, tmp_path / form, form) / "model.gguf")
    assert list(after) == list(before)
    kind = gguf.GGMLQuantizationType[form.upper()]
    for name, tensor in before.items():
        if "_exps" not in name:
            assert after[name].tensor_type == tensor.tensor_type
            numpy.testing.assert_array_equal(after[name].data, tensor.data)
            continue
        assert after[name].tensor_type == kind
        expected = gguf.quants.quantize(tensor.data, kind)
        numpy.testing.assert_array_equal(after[name].data.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("scales", ["amax", "search"])
@pytest.mark.parametrize("form", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_gguf_py_reads_the_values_of_two_level_blocks(
    tmp_path: pathlib.Path, form: str, scales: str
) -> None:
    """gguf-py makes no such blocks: its values of ours, and the error that we report of them."""
    write_wide(tmp_path / "model.gguf")
    out = tmp_path / "out"
    before = tensors_of(tmp_path / "model.gguf")
    after = tensors_of(convert(tmp_path / "model.gguf", out, form, scales) / "model.gguf")
    report = json.loads((out / "conversion.json").read_text())
    errors = {matrix["name"]: matrix["relative_error"] for matrix in report["matrices"]}
    for part in ("gate", "up", "down"):
        name = f"blk.0.ffn_{part}_exps"
        tensor = after[f"{name}.weight"]
        values = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[form.upper()])
        for expert, wanted in enumerate(before[f"{name}.weight"].data):
            off = values[expert].astype(numpy.float64) - wanted
            relative = numpy.linalg.norm(off) / numpy.linalg.norm(wanted)
            assert abs(relative - errors[f"{name}[{expert}]"]) < 1e-6 * relative


def test_gguf_py_reads_the_layers_of_a_directory(tmp_path: pathlib.Path) -> None:
    """Names, shapes, keys and values, the source being read by numpy."""
    sizes = ["-E", "3", "-k", "2", "-H", "256", "-I", "256", "--model-type", "mixtral"]
    source = synth(tmp_path / "model", *sizes)
    path = convert(source, tmp_path / "out", "q6_k", "search") / "model.gguf"
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert "MoE layers alone" in fields["general.description"]
    for key, value in (
        ("expert_count", 3),
        ("expert_used_count", 2),
        ("embedding_length", 256),
        ("feed_forward_length", 256),
        ("expert_weights_norm", True),
    ):
        assert fields[f"llama.{key}"] == value
    stored = safetensors.read(next(source.glob("*.safetensors")))
    tensors = tensors_of(path)
    router = numpy.asarray(stored["model.layers.0.block_sparse_moe.gate.weight"], numpy.float32)
    numpy.testing.assert_array_equal(tensors["blk.0.ffn_gate_inp.weight"].data, router)
    for part, number in (("gate", 1), ("up", 3), ("down", 2)):
        tensor = tensors[f"blk.0.ffn_{part}_exps.weight"]
        values = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType.Q6_K)
        for expert in range(3):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.w{number}.weight"
            wanted = numpy.asarray(stored[name], numpy.float32)
            assert values[expert].shape == wanted.shape
            off = numpy.linalg.norm(values[expert] - wanted) / numpy.linalg.norm(wanted)
            assert off < 0.02, f"{name} is off by {off}"


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_gguf_files_generate_the_same_tokens(
    qwen3_moe: pathlib.Path, tmp_path: pathlib.Path, form: str
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    out = convert(qwen3_moe, tmp_path / form, form)

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            out, gguf_file="model.gguf", dtype=torch.float32
        )

    check_tokens(load)
