#!/usr/bin/env python3
"""Makes a tuning table from a sweep over the expert kernels, and from the plans of the same layers.

    rows=cuda.stream_sm90,cuda.stream_fp8_sm90,cuda.tile_sm90,cuda.tile_fp8_sm90
    device_experts_bench --case mixtral-8x7b,qwen3-30b,qwen3-30b-fp8 --T 16,32,64,128,256,512,1024 --row $rows \\
        --tile all --replays 2 --check 0 > sweep.txt
    layer_bench --cases mixtral-8x7b,qwen3-30b,qwen3-30b-fp8 --plans 1 2> plans.txt > layers.jsonl
    python3 bench/h200/tuning_table.py sweep.txt plans.txt layers.jsonl --commit 491e18c > share/tuning/nvidia-h200.txt

The fastest of each case and number of tokens; what the plan has where that is within 3 % of it.
A whole layer takes longer than its experts, so its time bounds that of the kernel and tile it used. The
first timing of a case reads up to 16 % above that bound: it loses only where a layer's time confirms it.
Where a close call was measured again and appended to the sweep, the median counts.
"""

import argparse
import datetime
import json
import pathlib
import re
import statistics
import sys
import typing

TIE = 1.03
MOST_TOKENS = 1024
FORMATS = {"bf16": "bf16", "f16": "f16", "fp8block": "e4m3.block", "fp8channel": "e4m3.channel",
           "fp8static": "e4m3.tensor"}

CASE = re.compile(r"^([\w.-]+) T=(\d+) E=(\d+) k=(\d+) H=(\d+) I=(\d+) (\w+), \d+ experts active$")
TIMED = re.compile(r"^  (cuda\.\w+) (.+?) +([\d.]+) us ")
TILE = re.compile(r"\d+x\d+x\d+B, \d+ stages(, [\w ]+)*")
# What a kernel of two products prints of the tile that it was made of.
PRODUCTS = re.compile(r"(\d+) tokens, up (\d+) s(\d+) c(\d+)(?: g\d+)?( gathered)?, down ")
DEPTH_BYTES = 128
PLAN = re.compile(r"^[\w.-]+$")
RUNG = re.compile(r"(\d+) to (\d+) +(cuda\.\w+) +(\d+x.*?) {2,}")


class Problem(typing.NamedTuple):
    """What a line of the table begins with, in the order of the table's lines."""
    format: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int


class Timing(typing.NamedTuple):
    microseconds: float
    kernel: str
    tile: str


def tile_text(description: str) -> str:
    """The tile's name as `conclave explain` prints it."""
    if TILE.fullmatch(description):
        return description
    match = PRODUCTS.match(description)
    if match is None:
        raise SystemExit(f"not a tile: {description}")
    tokens, features, stages, cluster, gathered = match.groups()
    return (f"{tokens}x{features}x{DEPTH_BYTES}B, {stages} stages"
            + (f", cluster {cluster}" if int(cluster) > 1 else "") + ("" if gathered else ", sorted rows"))


def read_sweep(text: str) -> dict:
    """Timings by (case's name, problem)."""
    found, timings = {}, None
    for line in text.splitlines():
        if case := CASE.match(line):
            name, tokens, experts, top_k, hidden, intermediate, weights = case.groups()
            problem = Problem(FORMATS[weights], int(experts), int(hidden), int(intermediate), int(top_k), int(tokens))
            timings = found.setdefault((name, problem), [])
        elif timed := TIMED.match(line):
            if line.endswith("FAILED"):
                raise SystemExit(f"the sweep has a wrong result: {line.strip()}")
            kernel, description, microseconds = timed.groups()
            timings.append(Timing(float(microseconds), kernel, tile_text(description)))
    return found


def medians(sweep: dict) -> dict:
    """Of the timings of the same kernel and tile: a sweep may be repeated in one file."""
    merged = {}
    for cell, timings in sweep.items():
        of_tile = {}
        for timing in timings:
            of_tile.setdefault((timing.kernel, timing.tile), []).append(timing.microseconds)
        merged[cell] = [Timing(statistics.median(times), *tile) for tile, times in of_tile.items()]
    return merged


def read_plans(text: str) -> dict:
    """(last token, kernel, tile) of the rungs by case: of its first plan, which asks for nothing special."""
    plans, rungs = {}, None
    for line in text.splitlines():
        if PLAN.match(line):
            rungs = [] if line in plans else plans.setdefault(line, [])
        elif (rung := RUNG.search(line)) and rungs is not None:
            rungs.append((int(rung[2]), rung[3], rung[4]))
    return plans


def read_layers(text: str) -> dict:
    """Microseconds of the fastest whole layer by (case, tokens, "KERNEL TILE"), experts uniformly chosen."""
    bounds = {}
    for line in text.splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        if row.get("variant") in ("d1", "d2"):
            cell = row["case"], row["tokens"], row["kernel"].strip()
            bounds[cell] = min(row["us"], bounds.get(cell, row["us"]))
    return bounds


def bound(timing: Timing, limit: float | None) -> Timing:
    return timing if limit is None else timing._replace(microseconds=min(timing.microseconds, limit))


def is_planned(timing: Timing, rungs: list, tokens: int) -> bool:
    planned = next((rung[1:] for rung in rungs if tokens <= rung[0]), None)
    return (timing.kernel, timing.tile) == planned


def choose(timings: list, rungs: list, tokens: int) -> Timing:
    """The fastest, or the plan's choice if that is as fast."""
    best = min(timings)
    for timing in timings:
        if is_planned(timing, rungs, tokens) and timing.microseconds <= best.microseconds * TIE:
            return timing
    return best


def choose_all(sweep: dict, plans: dict, bounds: dict) -> list:
    """(problem, timing) of every entry, in the order of the table."""
    entries, begun = [], set()
    for (name, problem), timings in sweep.items():
        is_first = bool(timings) and name not in begun
        if is_first:
            begun.add(name)
        if problem.tokens > MOST_TOKENS or not timings:
            continue
        if name not in plans:
            raise SystemExit(f"no plan of {name}")
        limits = [bounds.get((name, problem.tokens, f"{timing.kernel} {timing.tile}")) for timing in timings]
        best = choose([bound(*pair) for pair in zip(timings, limits)], plans[name], problem.tokens)
        is_cold = is_first and limits[0] is None and is_planned(timings[0], plans[name], problem.tokens)
        if is_cold and best != timings[0]:
            print(f"{name}, {problem.tokens} tokens: left out, the plan's tile was timed first", file=sys.stderr)
            continue
        entries.append((problem, best))
    return sorted(entries)


def comment(arguments: argparse.Namespace) -> str:
    return f"""\
# Kernels for the experts of published models, measured {arguments.date} at commit {arguments.commit} on
# {arguments.machine}, by bench/h200/tuning_table.py from
# {arguments.replays} replays of each streaming and tiled kernel with each of its tiles.
# Measured are the experts alone: the copy of 16-bit rows into order is in the times where a tile
# wants sorted rows; quantising rows, routing and the weighted sum are not. Weights are cold.
# Where a whole layer with the same kernel and tile was faster than that, its time is the one here;
# only choices of the cost model have such times.
# The first timing of a case reads high: where only that speaks against the cost model's choice,
# there is no entry. Where that choice is within 3 % of the fastest, as runs differ, it is the one named.
# An entry serves calls of up to its number of tokens, down to the entry before. Nothing is here above
# {MOST_TOKENS} tokens: from 4096 the chip lowers its clock as it warms, which so few replays cannot tell
# from a better tile; there the cost model decides.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=pathlib.Path)
    parser.add_argument("plans", type=pathlib.Path)
    parser.add_argument("layers", type=pathlib.Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--device", default="NVIDIA H200", help="as the driver names it")
    parser.add_argument("--machine", default="one NVIDIA H200 of 132 multiprocessors, CUDA 13.0")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--replays", type=int, default=2)
    arguments = parser.parse_args()
    sweep = medians(read_sweep(arguments.sweep.read_text(encoding="utf-8")))
    plans = read_plans(arguments.plans.read_text(encoding="utf-8"))
    bounds = read_layers(arguments.layers.read_text(encoding="utf-8"))
    print(comment(arguments) + "conclave-tuning 1")
    for problem, best in choose_all(sweep, plans, bounds):
        print(f"{arguments.device} | {problem.format} | E {problem.experts} H {problem.hidden}"
              f" I {problem.intermediate} k {problem.top_k} | T {problem.tokens} | {best.kernel} | {best.tile}"
              f" | {best.microseconds:.3f}")


if __name__ == "__main__":
    main()
