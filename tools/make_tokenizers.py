#!/usr/bin/env python3
"""Writes testdata/tokenizers: small vocabularies of SentencePiece as directories of models have
them, and what their keys in a GGUF file are.

    python3 -m pip install -r tools/requirements-tokenizers.txt
    python3 tools/make_tokenizers.py [--check]

expected.json of a folder comes from the sentencepiece package's reading of tokenizer.model and from
gguf-py's of the other files. --check compares with what is there and writes nothing.
"""

import argparse
import filecmp
import io
import json
import pathlib
import sys
import tempfile

import gguf
import sentencepiece
import transformers

TESTDATA = pathlib.Path(__file__).resolve().parents[1] / "testdata" / "tokenizers"
ROWS = 392  # of the embedding
PIECES = 384
TEXT = [
    "It's 1234 tokens, isn't it? Naive words AND 42 CamelCases; x+=1",
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "def main():",
    "    return [token for token in tokens]",
    "ñandú and naïve façades, 你好",
] * 3
CHAT = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"


def train() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, model_type="bpe", vocab_size=PIECES,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, character_coverage=1.0,
        minloglevel=2, num_threads=1)
    return model.getvalue()


def write_json(path: pathlib.Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def added(content: str, special: bool) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": special}


def write_model(folder: pathlib.Path, model: bytes) -> None:
    """As Mixtral and Phi-3 have it: marks in each of the files that may add some."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(model)
    write_json(folder / "added_tokens.json", {"<extra>": PIECES})
    marks = {0: added("<unk>", True), 1: added("<s>", True), 2: added("</s>", True),
             PIECES + 1: added("<|user|>", False), PIECES + 2: added("two▁words", False),
             PIECES + 3: added("<end>", True)}
    write_json(folder / "tokenizer_config.json",
               {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
                "eos_token": added("<end>", True), "unk_token": "<unk>", "pad_token": None,
                "added_tokens_decoder": {str(key): value for key, value in marks.items()},
                "chat_template": CHAT, "tokenizer_class": "LlamaTokenizer"})
    write_json(folder / "special_tokens_map.json", {"eos_token": "</s>", "pad_token": "</s>"})
    write_json(folder / "expected.json", expected_of_model(folder))


def expected_of_model(folder: pathlib.Path) -> dict:
    """The rules of llama.cpp's converter, from the package's own reading of the pieces."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokens = [[f"[PAD{row}]", -10000.0, gguf.TokenType.UNUSED] for row in range(ROWS)]
    kinds = {"is_unknown": gguf.TokenType.UNKNOWN, "is_control": gguf.TokenType.CONTROL,
             "is_unused": gguf.TokenType.UNUSED, "is_byte": gguf.TokenType.BYTE}
    for piece in range(model.vocab_size()):
        kind = next((kind for name, kind in kinds.items() if getattr(model, name)(piece)),
                    gguf.TokenType.NORMAL)
        tokens[piece] = [model.id_to_piece(piece), model.get_score(piece), kind]
    for text, row in json.loads((folder / "added_tokens.json").read_text()).items():
        tokens[row] = [text, -1000.0, gguf.TokenType.USER_DEFINED]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for row, token in config["added_tokens_decoder"].items():
        text = token["content"]
        is_control = token["special"] or (text.startswith("<|") and text.endswith("|>"))
        kind = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
        tokens[int(row)] = [text.replace("▁", " "), -1000.0, kind]
    rows = {text: row for row, (text, _, _) in enumerate(tokens)}
    return {
        "tokens": [text for text, _, _ in tokens],
        "scores": [score for _, score, _ in tokens],
        "kinds": [int(kind) for _, _, kind in tokens],
        "ids": {"bos": rows["<s>"], "eos": rows["<end>"], "unknown": rows["<unk>"],
                "padding": rows["</s>"]},
        "flags": {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": True},
    }


def write_merges(folder: pathlib.Path, model: bytes) -> None:
    """The same vocabulary as transformers makes a tokenizer.json of it."""
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch)
        (source / "tokenizer.model").write_bytes(model)
        write_json(source / "config.json", {"model_type": "mixtral"})
        write_json(source / "tokenizer_config.json",
                   {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
                    "unk_token": "<unk>", "add_bos_token": True})
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
        tokenizer.add_tokens(["<extra>"])
        made = source / "made"
        tokenizer.save_pretrained(made)
        parts = json.loads((made / "tokenizer.json").read_text())
    folder.mkdir(parents=True)
    write_json(folder / "tokenizer.json", parts)
    write_json(folder / "tokenizer_config.json",
               {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                "extra_special_tokens": ["<|user|>"],
                "tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(folder / "expected.json", expected_of_merges(folder, model))


def expected_of_merges(folder: pathlib.Path, model: bytes) -> dict:
    """Scores of merged pieces are the model's own; pieces without a merge need only be behind."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    special = gguf.SpecialVocab(folder, n_vocab=ROWS)
    parts = json.loads((folder / "tokenizer.json").read_text())
    made = {"".join(merge) for merge in parts["model"]["merges"]}
    return {
        "tokens": [pieces.id_to_piece(row) for row in range(PIECES)],
        "scores": {piece: pieces.get_score(pieces.piece_to_id(piece)) for piece in sorted(made)},
        "ids": {"bos": special.special_token_ids["bos"], "eos": special.special_token_ids["eos"],
                "unknown": special.special_token_ids["unk"]},
        "flags": {"add_bos_token": special.add_special_token["bos"], "add_space_prefix": True},
    }


def write_all(folder: pathlib.Path) -> None:
    model = train()
    write_model(folder / "sentencepiece", model)
    write_merges(folder / "merged_pieces", model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if not check:
        write_all(TESTDATA)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        made = pathlib.Path(scratch) / "tokenizers"
        write_all(made)
        names = [path.relative_to(made) for path in sorted(made.rglob("*")) if path.is_file()]
        _, differ, missing = filecmp.cmpfiles(made, TESTDATA, names, shallow=False)
        for name in differ + missing:
            print(f"{name} differs")
        return 1 if differ or missing else 0


if __name__ == "__main__":
    sys.exit(main())
