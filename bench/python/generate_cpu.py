#!/usr/bin/env python3
"""Tokens per second of a Qwen3-MoE cut to a few layers: transformers' experts backends and ours.

Every implementation runs in a fresh process, all of them in turn, several rounds; the best round of
each counts. Layers have the released sizes (E=128, k=8, H=2048, I=768, 32 heads). The vocabulary is
cut by the same factor as the layers, so that the head keeps the share that it has in the whole model;
--vocab says otherwise. Weights are random: tokens are meaningless, their cost is not.

    PYTHONPATH=build/release/python python3 bench/python/generate_cpu.py --markdown results.md
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "conclave", "release", "patch")
OURS = ("conclave", "release", "patch")
RELEASED = {"layers": 48, "vocab": 151936}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=0, help="0: cut as the layers are")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--new", type=int, default=48, help="tokens decoded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(IMPLEMENTATIONS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.vocab:
        options.vocab = -(-RELEASED["vocab"] * options.layers // RELEASED["layers"] // 64) * 64
    return options


def fill(tensor, pattern) -> None:
    """Random numbers, quickly: one block of them again and again."""
    flat = tensor.view(-1)
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern.expand(whole // pattern.numel(), -1))
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def build(options: argparse.Namespace, device: str = "cpu"):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=options.vocab,
        num_hidden_layers=options.layers,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    rotary = model.model.rotary_emb
    model = model.to(getattr(torch, options.dtype)).to_empty(device=device).eval()
    model.model.rotary_emb = type(rotary)(config).to(device)
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(7)).to(device)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            scale = 1.0 if "norm" in name else 0.02
            pattern = (numbers * scale if "norm" not in name else 1 + 0 * numbers).to(weights.dtype)
            fill(weights.data, pattern[: 1 << 20] if "norm" not in name else pattern[:1])
    return model


def peak_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def select(model, name: str) -> str:
    """Puts an implementation in; returns what it says of itself."""
    if name == "patch":
        import conclave.transformers

        return str(conclave.transformers.patch(model, release=True))
    if name in OURS:
        import conclave.transformers

        conclave.transformers.set_implementation(model, release=name == "release")
        return ""
    model.set_experts_implementation(name)
    return ""


def time_prefill(model, ids) -> tuple:
    """The output and tokens per second; (None, 0) where memory is too small: batched_mm copies the
    weights of every token's experts."""
    best = float("inf")
    out = None
    for _ in range(3):
        start = time.perf_counter()
        try:
            out = model(ids, use_cache=True, logits_to_keep=1)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            return None, 0.0
        best = min(best, time.perf_counter() - start)
    return out, ids.numel() / best


def work(options: argparse.Namespace) -> dict:
    """One implementation in this process."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    note = select(model, options.worker)
    ids = torch.randint(
        0, options.vocab, (1, options.prompt), generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        start = time.perf_counter()
        model(ids[:, :8])  # packs and warms up
        first = time.perf_counter() - start
        out, prefill = time_prefill(model, ids)
        if out is None:  # decode all the same, after a prefill that fits
            model.set_experts_implementation("grouped_mm")
            out = model(ids, use_cache=True, logits_to_keep=1)
            model.set_experts_implementation(options.worker)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        steps, tokens = [], []
        for _ in range(options.new):
            start = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            steps.append(time.perf_counter() - start)
            tokens.append(int(token))
    steps.sort()
    return {
        "prefill": prefill,
        "decode": 1 / steps[len(steps) // 2],
        "first_call_s": first,
        "peak_gib": peak_bytes() / 2**30,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "note": note,
    }


def run_worker(options: argparse.Namespace, name: str) -> dict:
    command = [sys.executable, __file__, "--worker", name]
    for key in ("layers", "vocab", "prompt", "new", "dtype", "threads"):
        command += [f"--{key}", str(getattr(options, key))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, dict]:
    results: dict[str, dict] = {}
    for _ in range(options.rounds):
        for name in options.only:
            new = run_worker(options, name)
            old = results.setdefault(name, new)
            for key in ("prefill", "decode"):
                old[key] = max(old[key], new[key])
            old["peak_gib"] = max(old["peak_gib"], new["peak_gib"])
            print(f"{name:12} prefill {new['prefill']:8.1f}  decode {new['decode']:7.2f} tokens/s  "
                  f"peak {new['peak_gib']:.2f} GiB", file=sys.stderr, flush=True)  # fmt: skip
    return results


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def report(options: argparse.Namespace, results: dict[str, dict]) -> str:
    import torch
    import transformers

    others = [n for n in results if n not in OURS]
    best = {k: max((results[n][k] for n in others), default=0.0) for k in ("prefill", "decode")}
    threads = next(iter(results.values()))["threads"]
    lines = [
        f"Qwen3-MoE, {options.layers} layers of E=128, k=8, H=2048, I=768, {options.dtype}, "
        f"vocabulary {options.vocab}; prompt {options.prompt}, {options.new} new tokens; "
        f"{threads} threads of {cpu_name()}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Tokens per second; in brackets the factor over the "
        f"best of {', '.join(others)}.",
        "",
        "| experts | prefill | decode | peak memory, GiB | first call, s |",
        "|---|---|---|---|---|",
    ]
    for name, r in results.items():
        cells = [
            f"{r[k]:.1f}" + (f" ({r[k] / best[k]:.2f}x)" if best[k] else "")
            if r[k]
            else "out of memory"
            for k in ("prefill", "decode")
        ]
        label = {
            "release": "conclave, `set_implementation(release=True)`",
            "patch": "conclave, `patch(release=True)`",
        }.get(name, name)
        lines.append(
            f"| {label} | {cells[0]} | {cells[1]} | {r['peak_gib']:.2f} | {r['first_call_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments()
    if options.worker:
        print(json.dumps(work(options)))
        return
    results = measure(options)
    text = report(options, results)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
