#!/usr/bin/env python3
"""Times our layers on the CPU and those of another commit in pairs, in one process; docs/benchmarking.md says how.

    PYTHONPATH=build/release/python PAIRED_EARLIER=FOLDER python3 bench/paired_cpu.py --threads 1,16 --out paired.jsonl

Each line has the median of both, their ratio, and how far the two outputs lie apart.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "h200"))

from paired.alternation import time_hot  # noqa: E402
from paired.cases import parse_case  # noqa: E402
from paired.peers import earlier, ours  # noqa: E402
from paired.problem import Problem, Weights  # noqa: E402
from paired.statistics import spread  # noqa: E402

LEAST_ALTERNATIONS = 21


class HostDevice:
    """What paired.alternation asks for: forwards of all routings of a cell, one after the other."""

    def __init__(self, forwards: dict, routings: int):
        self._forwards, self._routings = forwards, routings

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def enqueue(self, names: list) -> list:
        times = []
        for name in names:
            begun = time.perf_counter()
            for index in range(self._routings):
                self._forwards[name](index)
            times.append((time.perf_counter() - begun) * 1e6 / self._routings)
        return times

    def collect(self, ticket: list) -> list:
        return ticket


def packages(earlier_first: bool) -> dict:
    """Today's package and the other one; both take their threads from torch. Layers are made in their order, and
    the memory that comes first may be the better one."""
    import conclave

    folder = os.environ.get("PAIRED_EARLIER", "")
    if not os.path.isdir(os.path.join(folder, "conclave")):
        sys.exit("PAIRED_EARLIER must name the folder that holds conclave/ of another build")
    found = {"ours": conclave, "earlier": earlier.import_from(os.path.abspath(folder))}
    return dict(reversed(found.items())) if earlier_first else found


def time_cell(found: dict, problem: Problem, seconds: float) -> dict:
    forwards = {name: ours.forward_of(ours.make_layer(package, problem.weights, problem.tokens), problem)
                for name, package in found.items()}
    outputs = {name: [run(index).clone() for index in range(problem.routings)] for name, run in forwards.items()}
    times = time_hot(HostDevice(forwards, problem.routings), list(forwards), seconds, random.Random(problem.tokens),
                     warm_share=0.2, least_replays=LEAST_ALTERNATIONS)
    now, then = spread(times["ours"]), spread(times["earlier"])
    pairs = zip(outputs["ours"], outputs["earlier"])
    apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    return {"case": problem.case.name, "tokens": problem.tokens, "ours": now.as_row(), "earlier": then.as_row(),
            "ratio": round(now.median / then.median, 4), "apart": apart, "error": problem.layer_error(outputs["ours"])}


def main() -> None:
    parser = argparse.ArgumentParser(prog="paired_cpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="32x4x1024x512,32x4x1024x512:e4m3,qwen3-30b,qwen3-30b-fp8,mixtral-8x7b")
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--threads", default=str(os.cpu_count()))
    parser.add_argument("--seconds", type=float, default=2.0, help="a cell")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--earlier-first", action="store_true", help="make the other commit's layers first")
    parser.add_argument("--commit", default="unknown", help="commit of ours")
    parser.add_argument("--out", help="file to append JSON lines to")
    options = parser.parse_args()
    end = time.time() + options.limit
    found = packages(options.earlier_first)
    sink = open(options.out, "a", encoding="utf-8") if options.out else None

    def emit(row: dict) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        if sink:
            print(line, file=sink, flush=True)

    emit({"kind": "machine", "processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
          "torch": torch.__version__, "commit": options.commit,
          "first": next(iter(found))})
    for case in map(parse_case, options.cases.split(",")):
        if time.time() > end:
            break
        weights = Weights(case, device="cpu")
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for tokens in map(int, options.tokens.split(",")):
                if time.time() > end:
                    break
                problem = Problem(case, tokens, weights, device="cpu")
                emit({"kind": "cell", "threads": threads, **time_cell(found, problem, options.seconds)})


if __name__ == "__main__":
    main()
