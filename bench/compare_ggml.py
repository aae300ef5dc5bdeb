#!/usr/bin/env python3
"""Runs `conclave bench` and ggml's experts by turns on this machine, for types that both have.

    python3 bench/compare_ggml.py --peer llama.cpp=build/ggml_experts --peer ik_llama.cpp=build/ik_experts

bench/peers/ggml_experts.cc says how the peers are built; a name that begins with "ik" also runs on
weights that it repacked, as does any peer that has a repacked form of the type. One round is one run
of each program for each type, all in a random order; a time is the median over rounds of the mean
call, a ratio the fastest peer's time over ours. JSON lines of every run go to --output, the table to
standard output.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_BINARY = ROOT / "build/release/apps/conclave/conclave"
# Our name of a type and ggml's.
TYPES = {
    "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_K": "q4_K", "Q5_K": "q5_K", "Q6_K": "q6_K", "Q3_K": "q3_K", "Q2_K": "q2_K",
    "IQ4_XS": "iq4_xs", "IQ4_NL": "iq4_nl", "IQ3_S": "iq3_s", "IQ2_XS": "iq2_xs", "MXFP4": "mxfp4", "F16": "f16",
    "BF16": "bf16",
}  # fmt: skip
OUR_ROWS = ("as they are", "int8")


@dataclass(frozen=True)
class Run:
    type: str
    program: str
    variant: str  # our rows, or whether a peer repacks
    command: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.type, self.program, self.variant


def json_lines(command: tuple[str, ...]) -> list[dict]:
    """What a program printed; nothing where it has no such form, which it says itself."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"compare_ggml: left out, exit {done.returncode}: {done.stderr.strip()[-160:]}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def runs_of(options: argparse.Namespace, ceilings: bool) -> list[Run]:
    sizes = [str(n) for n in options.sizes]
    ours = [str(options.conclave), "bench", "-E", sizes[0], "-k", sizes[1], "-H", sizes[2], "-I", sizes[3]]
    ours += ["--tokens", options.tokens, "--threads", str(options.threads), "-r", "3", "--format", "jsonl"]
    theirs = ["--experts", sizes[0], "--top-k", sizes[1], "--hidden", sizes[2], "--intermediate", sizes[3]]
    theirs += ["--tokens", options.tokens, "--threads", str(options.threads), "--seconds", "0.75"]
    runs = []
    for name in options.types:
        for rows in OUR_ROWS:
            command = [*ours, "--dtype", our_name(name)] + (["--rows", "int8"] if rows == "int8" else [])
            if not ceilings:
                command.append("--no-ceilings")
            runs.append(Run(name, "conclave", rows, tuple(command)))
        for peer, path in options.peers.items():
            command = (path, "--type", TYPES[name], *theirs)
            runs.append(Run(name, peer, "as stored", command))
            runs.append(Run(name, peer, "repacked", (*command, "--repack")))
    return runs


def our_name(name: str) -> str:
    return {"MXFP4": "mxfp4", "F16": "f16", "BF16": "bf16"}.get(name, name)


def measured(options: argparse.Namespace) -> list[dict]:
    """Every run's lines, with what ran."""
    rows, without = [], set()
    order = random.Random(options.seed)
    for number in range(options.rounds):
        runs = [run for run in runs_of(options, ceilings=number == 0) if run not in without]
        order.shuffle(runs)
        for at, run in enumerate(runs):
            print(f"\rround {number + 1} of {options.rounds}, run {at + 1} of {len(runs)} ", end="", file=sys.stderr)
            lines = json_lines(run.command)
            if not lines and number == 0:
                without |= {other for other in runs_of(options, False) if other.key == run.key}
            ran = {"round": number, "type": run.type, "program": run.program, "variant": run.variant}
            rows += [line | ran for line in lines]
    print(file=sys.stderr)
    return rows


def times_of(rows: list[dict]) -> dict[tuple, float]:
    """(type, program, variant, tokens) -> milliseconds."""
    found: dict[tuple, list[float]] = {}
    for row in rows:
        key = (row["type"], row["program"], row["variant"], row["tokens"])
        found.setdefault(key, []).append(row["ms_mean"])
    return {key: statistics.median(values) for key, values in found.items()}


def table(options: argparse.Namespace, rows: list[dict]) -> str:
    times = times_of(rows)
    read = statistics.median(row["read_ceiling_gbps"] for row in rows if row.get("read_ceiling_gbps"))
    heads = ["type", "T", *(f"conclave, rows {rows}" for rows in OUR_ROWS), "of read"]
    heads += [f"{peer}{kind}" for peer in options.peers for kind in ("", ", repacked")] + ["peer / ours"]
    lines = [f"read {read:.1f} GB/s; milliseconds", "", f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
    tokens = [int(n) for n in options.tokens.split(",")]
    for name in options.types:
        for count in tokens:
            of = lambda program, variant: times.get((name, program, variant, count))
            ours = [of("conclave", kind) for kind in OUR_ROWS]
            peers = [of(peer, kind) for peer in options.peers for kind in ("as stored", "repacked")]
            best, rival = (min((t for t in side if t), default=None) for side in (ours, peers))
            gbps = [r["gbps"] for r in rows if r["type"] == name and r["tokens"] == count and r.get("gbps")]
            share = f"{max(gbps) / read:.0%}".replace("%", " %") if gbps and count == 1 else ""
            ratio = f"{rival / best:.2f}" if best and rival else "-"
            cells = [f"{t:.3g}" if t else "-" for t in ours] + [share] + [f"{t:.3g}" if t else "-" for t in peers]
            lines.append(f"| {name} | {count} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conclave", type=pathlib.Path, default=DEFAULT_BINARY, help="the tool to measure")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="a program of ggml_experts.cc")
    parser.add_argument("--types", default=",".join(TYPES), help="of these")
    parser.add_argument("--sizes", default="128,8,2048,768", help="experts, a token's, hidden and intermediate size")
    parser.add_argument("--tokens", default="1,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines of every run")
    options = parser.parse_args()
    options.types = options.types.split(",")
    options.sizes = [int(n) for n in options.sizes.split(",")]
    options.peers = dict(peer.split("=", 1) for peer in options.peer)
    if unknown := [name for name in options.types if name not in TYPES]:
        parser.error(f"no such types: {', '.join(unknown)}")
    return options


def main() -> int:
    options = parse_arguments()
    rows = measured(options)
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table(options, rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
