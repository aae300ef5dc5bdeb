#!/usr/bin/env python3
"""Times Python entries, whose plans grow, against layers planned for exactly a call, on one GPU.

    PYTHONPATH=build/release/python python3 bench/h200/plans.py --out plans.jsonl
    ... bench/h200/plans.py --before            # the entries as before: 4096 tokens, then the rest

Every entry of a cell is captured into a CUDA graph of several forwards, each routed differently.
Entries take turns in an order drawn anew for each round, and a round's ratio to the exact layer is
one sample. Hot: after 2 s of load, without a rest. Cool: after 0.25 s of rest each. A line of JSON
for each cell, then a table: medians and quartiles, memory beside vLLM's buffers.

Memory is that of one eager call: the peak of torch's allocator and what cudaMemGetInfo lost, both
without the output. vLLM's buffers: [T k, 2N], [T k, N] and [T k, H] of the rows' type, sorted ids.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from plan_entries import CASES, Case, Forward, Sizes, Skip, forwards_of

import conclave
from conclave import vllm

TOKENS = [1, 16, 256, 1024, 4096, 5000, 8192, 16384]
ENTRIES = ["fused_experts", "FusedMoE", "backend", "patch"]


def captured(forward: Forward, forwards: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for i in range(forwards):
            forward(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for i in range(forwards):
            forward(i)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays


def load(graphs: list[torch.cuda.CUDAGraph], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()


@dataclasses.dataclass
class Samples:
    entry: list[float] = dataclasses.field(default_factory=list)
    exact: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ratios = [a / b for a, b in zip(self.entry, self.exact, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "us": statistics.median(self.entry),
            "exact_us": statistics.median(self.exact),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
        }


def measure(pair: list[torch.cuda.CUDAGraph], forwards: int, rounds: int, rest: float) -> Samples:
    once = microseconds(pair[1], 1)
    replays = max(1, min(50, int(20_000 / once)))  # some 20 ms a sample
    samples = Samples()
    for _ in range(rounds):
        order = [0, 1]
        random.shuffle(order)
        found = {}
        for which in order:
            if rest > 0:
                torch.cuda.synchronize()
                time.sleep(rest)
            found[which] = microseconds(pair[which], 1 if rest > 0 else replays) / forwards
        samples.entry.append(found[0])
        samples.exact.append(found[1])
    return samples


def memory_of(forward: Forward) -> dict[str, int]:
    """Bytes of one eager call beyond what there was before it."""
    with torch.no_grad():
        forward(0)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
        forward(0)
        torch.cuda.synchronize()
    return {
        "torch_bytes": torch.cuda.max_memory_allocated() - before,
        "device_bytes": free - torch.cuda.mem_get_info()[0],
    }


def vllm_bytes(sizes: Sizes, tokens: int) -> int:
    rows = tokens * sizes.top_k
    sorted_ids = (rows + sizes.experts * 127) * 4 * 2  # and the experts of their blocks
    return rows * (3 * sizes.inner + sizes.hidden) * 2 + sorted_ids


def run_cell(case: Case, name: str, entry: str, tokens: int, options: Any) -> dict[str, Any]:
    cell: dict[str, Any] = {"case": name, "entry": entry, "tokens": tokens}
    forwards = 8 if tokens <= 64 else 3 if tokens <= 1024 else 1
    given = case.inputs(tokens, forwards)
    forward, reference = forwards_of(case, entry, given, options.before)
    with torch.no_grad():  # from few tokens up, as a process meets them
        cell["memory"] = memory_of(forward)
    if entry != "fused_experts" and not options.before:  # that one is given its output
        cell["memory"]["torch_bytes"] -= given.out.numel() * given.out.element_size()
    cell["memory"]["vllm_bytes"] = vllm_bytes(case.sizes, tokens)
    pair = [captured(forward, forwards), captured(reference, forwards)]
    load(pair, options.seconds)
    cell["hot"] = measure(pair, forwards, options.rounds, 0.0).summary()
    cell["cool"] = measure(pair, forwards, options.cool_rounds, options.rest).summary()
    return cell


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| case | entry | T | us, hot | exact | ratio, hot | ratio, cool | torch MiB | device MiB "
        "| vLLM MiB |",
        "|---|---|---:|---:|---:|---|---|---:|---:|---:|",
    ]
    for cell in cells:
        head = f"| {cell['case']} | {cell['entry']} | {cell['tokens']} |"
        if "skipped" in cell:
            lines.append(f"{head} {cell['skipped']} | | | | | | |")
            continue
        hot, cool, memory = cell["hot"], cell["cool"], cell["memory"]
        lines.append(
            f"{head} {hot['us']:.1f} | {hot['exact_us']:.1f} "
            f"| {hot['ratio']:.3f} ({hot['ratio_low']:.3f} to {hot['ratio_high']:.3f}) "
            f"| {cool['ratio']:.3f} ({cool['ratio_low']:.3f} to {cool['ratio_high']:.3f}) "
            f"| {memory['torch_bytes'] / 2**20:.1f} | {memory['device_bytes'] / 2**20:.1f} "
            f"| {memory['vllm_bytes'] / 2**20:.1f} |"
        )
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--entries", default=",".join(ENTRIES))
    parser.add_argument("--before", action="store_true", help="entries run 4096 tokens, the rest")
    parser.add_argument("--seconds", type=float, default=2.0, help="of load before a hot cell")
    parser.add_argument("--rest", type=float, default=0.25, help="seconds before a cool sample")
    parser.add_argument("--rounds", type=int, default=40, help="of a hot cell")
    parser.add_argument("--cool-rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="file for the lines of JSON; default: stdout")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    build = conclave.build_info() if hasattr(conclave, "build_info") else {}
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **dict(build)}
    sink = open(options.out, "w") if options.out else sys.stdout
    print(json.dumps({"machine": head, "before": options.before}), file=sink, flush=True)
    cells = []
    for name in options.cases.split(","):
        case = Case(CASES[name])
        for tokens in map(int, options.tokens.split(",")):
            for entry in options.entries.split(","):
                try:
                    cell = run_cell(case, name, entry, tokens, options)
                except Skip as why:
                    cell = {"case": name, "entry": entry, "tokens": tokens, "skipped": str(why)}
                cells.append(cell)
                print(json.dumps(cell), file=sink, flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        del case
        vllm.forget_packed_layers()
        gc.collect()
        torch.cuda.empty_cache()
    print(table(cells), file=sys.stderr if not options.out else sys.stdout)


if __name__ == "__main__":
    main()
