#!/usr/bin/env python3
"""Text from a Mixture-of-Experts model of transformers, with its experts run by Conclave.

    python examples/generate.py                  a bundled tiny model: the same tokens, both rates
    python examples/generate.py MODEL_DIRECTORY  tokens per second of every experts backend

Needs torch and transformers 5.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import conclave.transformers

TINY = pathlib.Path(__file__).resolve().parents[1] / "testdata" / "models" / "qwen3_moe"
RIVALS = ("eager", "grouped_mm", "batched_mm")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path, default=TINY)
    parser.add_argument("--prompt", default="A mixture of experts is")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="repeat the prompt to this")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--dtype", default="", help="float32 for the tiny model, else the model's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--patch", action="store_true", help="replace whole MoE blocks")
    options = parser.parse_args()
    options.is_tiny = options.model == TINY
    options.dtype = options.dtype or ("float32" if options.is_tiny else "auto")
    options.new_tokens = options.new_tokens or (16 if options.is_tiny else 64)
    return options


def encode(options: argparse.Namespace, model) -> tuple[torch.Tensor, object]:
    """Token ids of the prompt, [1, T], and the tokenizer; without one, ids that mean nothing."""
    if any(options.model.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        ids = tokenizer(options.prompt, return_tensors="pt").input_ids
    else:
        tokenizer = None
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.arange(3, 3 + min(16, vocabulary - 3))[None]
    if options.prompt_tokens:
        repeats = -(-options.prompt_tokens // ids.shape[1])
        ids = ids.repeat(1, repeats)[:, : options.prompt_tokens]
    return ids.to(model.device), tokenizer


def generate(model, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy tokens, without those of the prompt."""
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :]


def seconds(model, ids: torch.Tensor, new_tokens: int) -> float:
    start = time.perf_counter()
    generate(model, ids, new_tokens)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rates(model, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Tokens per second of the prompt, and of those generated after it."""
    generate(model, ids[:, :4], 2)  # packs weights, warms up
    first = min(seconds(model, ids, 1) for _ in range(2))
    rest = min(seconds(model, ids, new_tokens) for _ in range(2)) - first
    return ids.shape[1] / first, (new_tokens - 1) / max(rest, 1e-9)


def report(name: str, measured: tuple[float, float]) -> None:
    prompt, generated = measured
    print(f"{name:12} prompt {prompt:10.1f} tokens/s   generated {generated:8.2f} tokens/s")


def use_conclave(model, options: argparse.Namespace) -> None:
    if options.patch:
        print(conclave.transformers.patch(model))
    else:
        conclave.transformers.set_implementation(model)


def main() -> int:
    options = arguments()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=options.dtype, experts_implementation="eager"
    )
    model = model.to(options.device).eval()
    ids, tokenizer = encode(options, model)
    expected = None
    for name in RIVALS[:1] if options.is_tiny else RIVALS:
        conclave.transformers.set_implementation(model, name)
        try:
            tokens = generate(model, ids, options.new_tokens)
            report(name, rates(model, ids, options.new_tokens))
        except (RuntimeError, ImportError) as error:  # batched_mm copies weights for every token
            print(f"{name:12} {str(error).splitlines()[0]}")
            continue
        expected = tokens if expected is None else expected
    use_conclave(model, options)
    tokens = generate(model, ids, options.new_tokens)
    report("conclave", rates(model, ids, options.new_tokens))
    print(tokenizer.decode(tokens) if tokenizer else tokens.tolist())
    if expected is None:
        return 0
    same = int((tokens == expected).long().cumprod(0).sum())
    print(f"{same} of {len(tokens)} greedy tokens as with eager experts, {model.dtype}")
    return 0 if same == len(tokens) or model.dtype != torch.float32 else 1


if __name__ == "__main__":
    sys.exit(main())
