"""Vocabularies of directories as keys of GGUF files: gguf-py reads them, and llama.cpp makes the
tokens of a text that the tokenizer of the directory makes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from support.converted import convert

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")


def make_model(directory: pathlib.Path, vocabulary: int) -> None:
    """A model of the given number of tokens, small in all else."""
    torch.manual_seed(6)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=96,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=256,
        vocab_size=vocabulary,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(directory)


SPLITS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "dbrx": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-2": None,
}
TEXT = "It's 1234 tokens, isn't it?\n\n  Naïve words AND 42 CamelCases <|end|>; ñandú 你好 x+=1;"


def make_tokenizer(pattern: str | None, directory: pathlib.Path) -> Any:
    """A byte-level vocabulary of 320 words, the last two of them marks."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    else:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        steps = [split, byte_level(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=318, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "token words isn't 12 34 it was"] * 4, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_vocabularies_become_keys(tmp_path: pathlib.Path, split: str) -> None:
    source = tmp_path / "source"
    make_model(source, 330)
    tokenizer = make_tokenizer(SPLITS[split], source)
    out = convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    assert json.loads((out / "conversion.json").read_text())["no_tokenizer"] == ""
    fields = gguf.GGUFReader(out / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == split
    words = fields["tokenizer.ggml.tokens"].contents()
    assert words[:256] == [tokenizer.id_to_token(token) for token in range(256)]
    size = tokenizer.get_vocab_size()
    assert words[size:] == [f"[PAD{token}]" for token in range(size, 330)]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert [kinds[token] for token in (0, size - 1, size)] == [1, 3, 5]

    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(out / "model.gguf")
    parameters.n_ctx = 512
    parameters.n_parallel = 1
    parameters.warmup = False
    server = xllamacpp.Server(parameters)

    def complete(prompt: Any) -> Any:
        request = {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1}
        answer = server.handle_completions({**request, "cache_prompt": False})
        return answer if isinstance(answer, dict) else json.loads(answer)

    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    by_text, by_tokens = complete(TEXT), complete(tokens)
    assert by_text["usage"]["prompt_tokens"] == len(tokens)
    assert by_text["choices"][0]["logprobs"] == by_tokens["choices"][0]["logprobs"]


def test_other_vocabularies_are_left_out_with_the_reason(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    make_model(source, 330)
    make_tokenizer(r"\w+|\W+", source)
    out = convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    report = json.loads((out / "conversion.json").read_text())
    assert "a pattern without a name" in report["no_tokenizer"]
    assert "tokenizer.ggml.model" not in gguf.GGUFReader(out / "model.gguf").fields
