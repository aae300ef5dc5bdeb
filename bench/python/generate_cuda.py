#!/usr/bin/env python3
"""Tokens per second of a Qwen3-MoE cut to a few layers on a GPU: transformers' experts and ours.

One model, whose implementation is exchanged, all of them in turn, several rounds; the best of each
counts. Layers have the released sizes, as in generate_cpu.py. Weights are random: tokens are
meaningless, their cost is not. Everything but the experts is transformers' own and the same for all.

    PYTHONPATH=build/release/python python3 bench/python/generate_cuda.py --markdown results.md
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import torch
import transformers
from generate_cpu import IMPLEMENTATIONS, OURS, RELEASED, build, cpu_name, select

LABELS = {"patch": "conclave, `patch(release=True)`"}


def common_parser(description: str, names: tuple[str, ...]) -> argparse.ArgumentParser:
    """Options of a comparison of the implementations `names`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=0, help="0: cut as the layers are")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32], help="in decode")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1, 32, 512, 4096], help="of a block alone"
    )
    parser.add_argument("--context", type=int, default=128, help="tokens before a decode")
    parser.add_argument("--new", type=int, default=32, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(names))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    return parser


def cut_vocabulary(layers: int, released: dict[str, int]) -> int:
    """A vocabulary by which the head keeps the share that it has in the whole model."""
    return -(-released["vocab"] * layers // released["layers"] // 64) * 64


def arguments() -> argparse.Namespace:
    parser = common_parser(__doc__.partition("\n")[0], IMPLEMENTATIONS)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    options.vocab = options.vocab or cut_vocabulary(options.layers, RELEASED)
    return options


def random_ids(model, options: argparse.Namespace, batch: int, tokens: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(3)
    return torch.randint(0, options.vocab, (batch, tokens), generator=numbers).to(model.device)


def wait(model) -> None:
    """Until the GPU has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def prefill(model, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds, and the logits of the last token."""
    wait(model)
    start = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    wait(model)
    return time.perf_counter() - start, out.logits[:, -1].float()


def decode(model, ids: torch.Tensor, steps: int) -> float:
    """Seconds of a greedy step, whose token stays on the GPU."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    wait(model)
    start = time.perf_counter()
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    wait(model)
    return (time.perf_counter() - start) / steps


def block_seconds(model, tokens: int, captured: bool) -> float:
    """Seconds of one MoE block, all of them in turn, without the time that Python takes to launch
    them where they can be captured into a graph."""
    blocks = [layer.mlp for layer in model.model.layers]
    shape = (1, tokens, model.config.hidden_size)
    hidden = torch.randn(shape, device=model.device, dtype=model.dtype)

    def work() -> None:
        for block in blocks:
            block(hidden)

    if not hidden.is_cuda:
        work()
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / len(blocks)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    replay = work
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 4e3)
    return best / len(blocks)


class Measured:
    """The best rates of each implementation by workload, and what else there is to say of it."""

    def __init__(self) -> None:
        self.rates: dict[str, dict[str, float]] = {}
        self.peaks: dict[str, float] = {}
        self.distances: dict[str, float] = {}
        self.blocks: dict[str, dict[int, float]] = {}  # seconds
        self._logits: torch.Tensor | None = None

    def add(self, name: str, workload: str, rate: float) -> None:
        rates = self.rates.setdefault(name, {})
        rates[workload] = max(rates.get(workload, 0.0), rate)

    def add_block(self, name: str, tokens: int, seconds: float) -> None:
        blocks = self.blocks.setdefault(name, {})
        blocks[tokens] = min(blocks.get(tokens, float("inf")), seconds)

    def compare(self, name: str, logits: torch.Tensor) -> None:
        """With those of the first implementation."""
        if self._logits is None:
            self._logits = logits
        distance = (logits - self._logits).norm() / self._logits.norm()
        self.distances[name] = float(distance)


def measure(model, name: str, options: argparse.Namespace, found: Measured) -> None:
    for i, tokens in enumerate(options.prompts):
        ids = random_ids(model, options, 1, tokens)
        try:
            best, logits = min((prefill(model, ids) for _ in range(3)), key=lambda pair: pair[0])
        except torch.OutOfMemoryError:
            found.add(name, f"prefill {tokens}", 0.0)
            torch.cuda.empty_cache()
            continue
        found.add(name, f"prefill {tokens}", tokens / best)
        if i == 0:
            found.compare(name, logits)
    for batch in options.batches:
        ids = random_ids(model, options, batch, options.context)
        if name == "batched_mm":  # a prefill that fits, one decode behind it
            ids = ids[:, :1]
        try:
            decode(model, ids, 2)
            found.add(name, f"decode {batch}", batch / decode(model, ids, options.new))
        except torch.OutOfMemoryError:
            found.add(name, f"decode {batch}", 0.0)
            torch.cuda.empty_cache()
    print(f"{name:12} {found.rates[name]}", file=sys.stderr, flush=True)


def measure_with_peak(model, name: str, options: argparse.Namespace, found: Measured) -> None:
    torch.cuda.reset_peak_memory_stats()
    measure(model, name, options, found)
    found.peaks[name] = torch.cuda.max_memory_allocated() / 2**30


def fits(name: str, tokens: int) -> bool:
    """batched_mm copies the weights of every token's experts."""
    copied = tokens * 8 * 3 * 2048 * 768 * 2
    return name != "batched_mm" or copied < torch.cuda.mem_get_info()[0] // 3


def measure_blocks(model, name: str, options: argparse.Namespace, found: Measured) -> None:
    for tokens in options.tokens:
        seconds = float("inf")
        if fits(name, tokens):
            # Eager experts ask the GPU which experts were chosen.
            seconds = block_seconds(model, tokens, captured=name != "eager")
        found.add_block(name, tokens, seconds)
        torch.cuda.empty_cache()
    print(f"{name:12} {found.blocks[name]}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> Measured:
    found = Measured()
    with torch.no_grad():
        model = build(options, "cuda")
        # `patch` frees the model's own weights, so it comes last; the backend has none to free,
        # since kernels on a GPU read them where the model has them.
        names = [n for n in options.only if n not in ("patch", "release")]
        for _ in range(options.rounds):
            for name in names:
                select(model, name)
                measure_with_peak(model, name, options, found)
                torch.cuda.empty_cache()
        for name in names:
            select(model, name)
            measure_blocks(model, name, options, found)
        if "patch" in options.only:
            model.set_experts_implementation("eager")
            select(model, "patch")
            for _ in range(options.rounds):
                measure_with_peak(model, "patch", options, found)
            measure_blocks(model, "patch", options, found)
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def report(
    model: str,
    options: argparse.Namespace,
    found: Measured,
    labels: dict[str, str] = LABELS,
    memory: str = "peak of torch, GiB",
) -> str:
    """Two tables, behind what `model` says of the model."""
    others = [n for n in found.rates if n not in OURS]
    workloads = [f"prefill {t}" for t in options.prompts] + [f"decode {b}" for b in options.batches]
    best = {w: max((found.rates[n].get(w, 0.0) for n in others), default=0.0) for w in workloads}
    heads = [f"prefill, {t} tokens" for t in options.prompts]
    heads += [f"decode, {b} at once" for b in options.batches]
    lines = [
        f"{model}, vocabulary {options.vocab}, {device_name()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Tokens per second, the best of {options.rounds} "
        f"rounds; in brackets the factor over the best of {', '.join(others)}. Decode: "
        f"{options.new} greedy tokens behind {options.context}"
        f"{' (batched_mm: behind 1)' if 'batched_mm' in others else ''}. Distance: relative, of "
        "the last token's logits, from the first row.",
        "",
        f"| experts | {' | '.join(heads)} | {memory} | distance of logits |",
        "|---|" + "---:|" * (len(heads) + 2),
    ]
    for name, rates in found.rates.items():
        cells = []
        for workload in workloads:
            rate = rates.get(workload, 0.0)
            factor = f" ({rate / best[workload]:.2f}x)" if best[workload] else ""
            cells.append(f"{rate:.0f}{factor}" if rate else "out of memory")
        lines.append(
            f"| {labels.get(name, name)} | {' | '.join(cells)} | {found.peaks[name]:.2f} | "
            f"{found.distances.get(name, float('nan')):.1e} |"
        )
    return "\n".join([*lines, "", *report_blocks(options, found, labels)]) + "\n"


def report_blocks(
    options: argparse.Namespace, found: Measured, labels: dict[str, str]
) -> list[str]:
    others = [n for n in found.blocks if n not in OURS]
    best = {t: min(found.blocks[n][t] for n in others) for t in options.tokens} if others else {}
    heads = " | ".join(f"{t} tokens" for t in options.tokens)
    lines = [
        "One MoE block alone, microseconds: all layers in turn, captured into a CUDA graph but for eager "
        "experts, which cannot be. In brackets the factor over the best of the others.",
        "",
        f"| experts | {heads} |",
        "|---|" + "---:|" * len(options.tokens),
    ]
    for name, blocks in found.blocks.items():
        cells = []
        for tokens in options.tokens:
            seconds = blocks[tokens]
            factor = f" ({best[tokens] / seconds:.2f}x)" if best else ""
            cells.append(f"{seconds * 1e6:.0f}{factor}" if seconds < 1e6 else "out of memory")
        lines.append(f"| {labels.get(name, name)} | {' | '.join(cells)} |")
    return lines


def publish(text: str, options: argparse.Namespace, found: Measured) -> None:
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps(vars(found) | {"_logits": None}, indent=1) + "\n")


def main() -> None:
    options = arguments()
    found = run(options)
    model = f"Qwen3-MoE, {options.layers} layers of E=128, k=8, H=2048, I=768, {options.dtype}"
    publish(report(model, options, found), options, found)


if __name__ == "__main__":
    sys.exit(main())
