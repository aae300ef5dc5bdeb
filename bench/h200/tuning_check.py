#!/usr/bin/env python3
"""Holds the default choice of kernel and tile against every other one, on a GPU under load.

    PYTHONPATH=build/release/python python3 bench/h200/tuning_check.py --out tuning.jsonl

The default is a layer with the table of --tuning, or with none: the cost model then chooses. Every other choice is a
layer with a table of that entry alone. All use the same weights where they lie, so each costs only its scratch memory,
and each is a CUDA graph of several forwards, routed differently; its output is held to float64 first.

All choices of a cell alternate in random order, without a rest. The two fastest and the default then alternate again,
three of them, twice as long, and only that is reported: the least of a dozen noisy medians is lower than what its
choice takes, and would show losses where there are none; the least of two hardly is. A ratio is a choice's time over
the default's in the same round, so that below 1 the default loses; quartiles are those of the rounds.
"""

import argparse
import random
import time

from paired.alternation import time_hot
from paired.bench import Sink, machine
from paired.cases import cells_in_order, parse_case
from paired.statistics import spread

CASES = "qwen3-30b,qwen3-235b-fp8,mixtral-8x7b,qwen3-30b-fp8,qwen3-235b,mixtral-8x7b-fp8"
FORMATS = ("bf16", "e4m3")
DEFAULT = "default"
FINALISTS = 2
LOSS = 0.02
CELL_SECONDS = 6.0  # no cell begins with less left


def label(entry: dict) -> str:
    """A choice's name, from an entry of a table or a rung of a plan."""
    return f"{entry['kernel']} {entry['tile']}".strip()


def chosen(ladder: list, tokens: int) -> str:
    return label(next(rung for rung in ladder if rung["first_tokens"] <= tokens <= rung["last_tokens"]))


def alternate(device, names: list, seconds: float, rounds: int, rng: random.Random) -> tuple:
    """The spread of the default's microseconds, and of the others' ratios to it, the lowest median first."""
    times = time_hot(device, [DEFAULT, *names], seconds, rng, least_replays=rounds)
    ratios = {name: spread([us / default for us, default in zip(times[name], times[DEFAULT])]) for name in names}
    return spread(times[DEFAULT]), dict(sorted(ratios.items(), key=lambda item: item[1].median))


def contest(device, names: list, seconds: float, rounds: int, rng: random.Random) -> dict:
    """What a cell's line says of the default and of the other choices, at least one."""
    _, first = alternate(device, names, seconds, rounds, rng)
    us, final = alternate(device, list(first)[:FINALISTS], 2 * seconds, 2 * rounds, rng)
    best, ratio = next(iter(final.items()))
    return {
        "us": round(us.median, 3), "best": best, "ratio": round(ratio.median, 4), "q1": round(ratio.low, 4),
        "q3": round(ratio.high, 4), "n": ratio.count, "first": {name: round(r.median, 4) for name, r in first.items()},
    }


def graph_of(name: str, layer, problem):
    """The graph of a layer whose output is right."""
    from paired.cell import choose
    from paired.peers import ours
    from paired.plugin import Candidate, Peer

    candidate = Candidate(name, ours.forward_of(layer, problem), problem.layer_error)
    best, notes = choose(Peer(name, ours.TITLE, ours.WHAT, FORMATS, lambda _: iter([candidate])), problem, lambda: False)
    if best is None:
        raise RuntimeError(f"{name}: {notes[0]}")
    return best[2]


def graphs_of(problem, table: str | None) -> tuple:
    """The default's choice, and graphs by name: of the default and of every other choice."""
    import conclave
    from paired.peers.ours import make_layer

    layer = make_layer(conclave, problem.weights, problem.tokens, table)
    default = chosen(layer.plan["ladder"], problem.tokens)
    options = conclave.LayerOptions(max_tokens=problem.tokens)
    graphs = {DEFAULT: graph_of(DEFAULT, layer, problem)}
    for entry in conclave.tuning_candidates(layer.spec, problem.tokens, device=layer.device, options=options):
        name = label(entry)
        if name == default:
            continue
        layer = make_layer(conclave, problem.weights, problem.tokens, conclave.TuningTable([entry]))
        if (found := chosen(layer.plan["ladder"], problem.tokens)) != name:
            raise RuntimeError(f"a table of {name} makes a layer of {found}")
        graphs[name] = graph_of(name, layer, problem)
    if len(graphs) == 1:
        raise RuntimeError(f"there is no choice but {default}")
    return default, graphs


def run(options, emit) -> list:
    """The lines of the cells that were timed. Emits them, and the reason where there is none."""
    import torch
    from paired.cell import GpuLost
    from paired.device import CudaDevice
    from paired.plugin import one_line
    from paired.problem import Problem, Weights

    end, rows = options.began + options.limit, []
    for case, tokens_list in cells_in_order(options.cases, options.tokens):
        weights = None
        for tokens in tokens_list:
            here = {"case": case.name, "format": case.format, "tokens": tokens}
            if time.time() > end - CELL_SECONDS:
                emit(kind="absent", reason="the time is up", **here)
                continue
            try:
                weights = weights or Weights(case)
                default, graphs = graphs_of(Problem(case, tokens, weights), options.tuning)
                names = [name for name in graphs if name != DEFAULT]
                found = contest(CudaDevice(graphs), names, options.seconds, options.rounds, random.Random(tokens))
                rows.append({**here, "default": default, **found})
                emit(kind="choice", **rows[-1])
            except GpuLost as error:
                emit(kind="absent", reason=f"lost the GPU: {error.peer}: {error}", **here)
                return rows
            except Exception as error:
                emit(kind="absent", reason=one_line(error), **here)
            graphs = None
            torch.cuda.empty_cache()
    return rows


def losses(rows: list) -> list:
    return sorted((row for row in rows if row["ratio"] < 1 - LOSS), key=lambda row: row["ratio"])


def report(rows: list) -> str:
    lines = ["| cell | default | us | best other | ratio (quartiles) |", "|---|---|---:|---|---|"]
    for row in rows:
        lines.append(f"| {row['case']}, {row['tokens']} | {row['default']} | {row['us']:.1f} | {row['best']} "
                     f"| {row['ratio']:.3f} ({row['q1']:.3f} to {row['q3']:.3f}) |")
    lost = losses(rows)
    lines += ["", f"The default loses more than {LOSS:.0%} in {len(lost)} of {len(rows)} cells."]
    lines += [f"- {row['case']}, {row['tokens']} tokens: {1 - row['ratio']:.1%} to {row['best']}" for row in lost]
    return "\n".join(lines)


def parse(arguments: list | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tuning_check.py", description="The default choice of kernels against all others.")
    parser.add_argument("--cases", default=CASES, help="names, or ExkxHxI[:format], in bf16 or e4m3")
    parser.add_argument("--tokens", default="16,256,1024,4096")
    parser.add_argument("--rounds", type=int, default=15, help="timed in a cell's first alternation, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="of load in that alternation, half of them timed")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--tuning", help="a table for the default; without one the cost model chooses")
    parser.add_argument("--commit", help="of what is measured, where git does not tell")
    parser.add_argument("--out", help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    try:
        options.cases = [parse_case(name) for name in options.cases.split(",")]
        options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    except ValueError as error:
        parser.error(str(error))
    for case in options.cases:
        if case.format not in FORMATS:
            parser.error(f"{case.name}: expected one of {', '.join(FORMATS)}, found {case.format}")
    if min(options.tokens) < 1:
        parser.error(f"tokens: expected 1 or more, found {min(options.tokens)}")
    options.began = time.time()
    return options


def main() -> None:
    options = parse()
    emit = Sink(options.out)
    emit(**machine(options.commit))
    print(report(run(options, emit)))


if __name__ == "__main__":
    main()
