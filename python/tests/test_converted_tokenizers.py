"""Vocabularies of directories as keys of GGUF files: gguf-py reads them, and llama.cpp makes the
tokens of a text that the tokenizer of the directory makes."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest

import conclave
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


DIGITS = None  # the step that sets each digit apart
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
SPLITS: dict[str, tuple[str | None, ...]] = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "dbrx": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-2": (),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "deepseek-llm": (
        "[\r\n]",
        f"\\s?[{CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        "\\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        DIGITS,
    ),
}
TEXT = "It's 1234 tokens, isn't it?\n\n  Naïve words AND 42 CamelCases <|end|>; ñandú 你好 x+=1;"


def make_tokenizer(patterns: tuple[str | None, ...], directory: pathlib.Path) -> Any:
    """A byte-level vocabulary of 320 words, the last two of them marks."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [
        tokenizers.pre_tokenizers.Digits(individual_digits=True)
        if pattern is DIGITS
        else tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in patterns
    ]
    steps.append(byte_level(add_prefix_space=False, use_regex=not patterns))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps) if patterns else steps.pop()
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
    make_tokenizer((r"\w+|\W+",), source)
    out = convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    report = json.loads((out / "conversion.json").read_text())
    assert "a pattern without a name" in report["no_tokenizer"]
    assert "tokenizer.ggml.model" not in gguf.GGUFReader(out / "model.gguf").fields


def test_merges_of_digits_that_the_rule_sets_apart_are_refused(tmp_path: pathlib.Path) -> None:
    """llama.cpp's rule leaves digits together, and would merge them."""
    source = tmp_path / "source"
    make_model(source, 330)
    make_tokenizer(SPLITS["deepseek-llm"][:-1], source)
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    steps = tokenizer["pre_tokenizer"]["pretokenizers"]
    steps.insert(-1, {"type": "Digits", "individual_digits": True})
    path.write_text(json.dumps(tokenizer))
    out = convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    report = json.loads((out / "conversion.json").read_text())
    assert "merges have digits" in report["no_tokenizer"]


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
    with pytest.raises(conclave.ConclaveCheckpointError) as failure:
        convert(source, tmp_path / "file", "q8_0", keep="*=f32")
    assert failure.value.name == "kTokenizerModel" and failure.value.file == str(path)
