"""Vocabularies of directories as keys of GGUF files: gguf-py reads them, and llama.cpp makes the
tokens of a text that the tokenizer of the directory makes."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
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


def expect_tokens(file: pathlib.Path, text: str, tokens: list[int]) -> None:
    """llama.cpp says the same of the text as of these tokens."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx = 512
    parameters.n_parallel = 1
    parameters.warmup = False
    server = xllamacpp.Server(parameters)

    def complete(prompt: Any) -> Any:
        request = {"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1}
        answer = server.handle_completions({**request, "cache_prompt": False})
        return answer if isinstance(answer, dict) else json.loads(answer)

    by_text, by_tokens = complete(text), complete(tokens)
    assert by_text["usage"]["prompt_tokens"] == len(tokens)
    assert by_text["choices"][0]["logprobs"] == by_tokens["choices"][0]["logprobs"]


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

    expect_tokens(out / "model.gguf", TEXT, tokenizer.encode(TEXT, add_special_tokens=False).ids)


def test_other_vocabularies_are_left_out_with_the_reason(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    make_model(source, 330)
    make_tokenizer(r"\w+|\W+", source)
    out = convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    report = json.loads((out / "conversion.json").read_text())
    assert "a pattern without a name" in report["no_tokenizer"]
    assert "tokenizer.ggml.model" not in gguf.GGUFReader(out / "model.gguf").fields


# Spaces before, within and behind words, characters without a piece, digits, and merges that differ
# from those of equal scores.
SENTENCES = (
    "It's 1234 tokens, isn't it?",
    "  def main():\n    return [token]  ",
    "an ox or hes, ok",
    "ñandú façades 你好 \U0001f999 x+=1\tThe quick brown jugs",
)
ROWS = 392


def with_tokenizer(name: str, source: pathlib.Path, testdata: pathlib.Path) -> pathlib.Path:
    make_model(source, ROWS)
    folder = testdata / "tokenizers" / name
    for path in folder.iterdir():
        if path.name != "expected.json":
            shutil.copy(path, source)
    return folder


def fields_of(source: pathlib.Path, out: pathlib.Path) -> Any:
    convert(source, out, "q8_0", keep="*=f32")
    assert json.loads((out / "conversion.json").read_text())["no_tokenizer"] == ""
    return gguf.GGUFReader(out / "model.gguf").fields


@pytest.mark.parametrize("name", ["sentencepiece", "merged_pieces"])
def test_pieces_become_keys(name: str, tmp_path: pathlib.Path, testdata: pathlib.Path) -> None:
    """gguf-py's own reading of the directory, and llama.cpp's tokens, are those of the package."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    source = tmp_path / "source"
    with_tokenizer(name, source, testdata)
    fields = fields_of(source, tmp_path / "file")
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    known = gguf.SpecialVocab(source, n_vocab=ROWS)
    spelling = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    for role, token in known.special_token_ids.items():
        key = f"tokenizer.ggml.{spelling.get(role, role)}_token_id"
        assert fields[key].contents() == token
    for role, flag in known.add_special_token.items():
        if role in ("bos", "eos"):
            assert fields[f"tokenizer.ggml.add_{role}_token"].contents() == flag

    path = testdata / "tokenizers" / "sentencepiece" / "tokenizer.model"
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    words = fields["tokenizer.ggml.tokens"].contents()
    assert words[:384] == [model.id_to_piece(token) for token in range(384)]
    scores = fields["tokenizer.ggml.scores"].contents()
    merged = [token for token in range(259, 384) if len(words[token]) > 1]
    assert [scores[token] for token in merged] == [model.get_score(token) for token in merged]
    for sentence in SENTENCES:
        tokens = [model.bos_id(), *model.encode(sentence)]
        expect_tokens(tmp_path / "file" / "model.gguf", sentence, tokens)


def test_marks_within_a_text_are_single_tokens(
    tmp_path: pathlib.Path, testdata: pathlib.Path
) -> None:
    source = tmp_path / "source"
    with_tokenizer("sentencepiece", source, testdata)
    fields = fields_of(source, tmp_path / "file")
    words = fields["tokenizer.ggml.tokens"].contents()
    token = words.index("\u2581token")
    expected = [1, words.index("<|user|>"), token, words.index("<extra>"), token]
    expected += [words.index("<end>")]
    expect_tokens(tmp_path / "file" / "model.gguf", "<|user|>token<extra>token<end>", expected)


def test_merges_have_the_tokens_of_the_directory(
    tmp_path: pathlib.Path, testdata: pathlib.Path
) -> None:
    """gguf-py gives all pieces one score there, so that it is no reference for the merges."""
    source = tmp_path / "source"
    with_tokenizer("merged_pieces", source, testdata)
    fields = fields_of(source, tmp_path / "file")
    reference = list(gguf.vocab.LlamaHfVocab(source).all_tokens())
    words = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert words[: len(reference)] == [text.decode() for text, _, _ in reference]
    assert kinds[: len(reference)] == [int(kind) for _, _, kind in reference]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    for sentence in SENTENCES:
        expect_tokens(tmp_path / "file" / "model.gguf", sentence, tokenizer.encode(sentence))


def test_a_damaged_model_ends_the_conversion(
    tmp_path: pathlib.Path, testdata: pathlib.Path
) -> None:
    source = tmp_path / "source"
    with_tokenizer("sentencepiece", source, testdata)
    path = source / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(subprocess.CalledProcessError) as failure:
        convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    assert str(path) in failure.value.stderr.decode()
