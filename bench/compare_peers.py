#!/usr/bin/env python3
"""Runs `conclave bench` and the peers alternately on this machine and stores the ratios.

    python3 bench/compare_peers.py --tokens 1,64,1024 --threads 2

One round is one run of each program, ours first; rounds repeat, so that a drifting clock or a busy
neighbour falls on both. A time is the median over rounds of the mean a run reports; a ratio is the
best peer's time over ours, for the same tokens. Results go to bench/results/<date>-<cpu>.{json,md}.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / "bench/peers/transformers_cpu.py"
DEFAULT_BINARY = ROOT / "build/release/apps/conclave/conclave"


def run_jsonl(command: list[str]) -> list[dict]:
    """The JSON lines a program prints; it ends the comparison when the program fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"compare_peers: exit status {done.returncode} from: {shlex.join(command)}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip()


def commit() -> str:
    """The commit, marked when the working tree differs from it in more than these results."""
    changed = output_of("git", "status", "--porcelain", "--", ".", ":!bench/results")
    return (output_of("git", "rev-parse", "HEAD") or "unknown") + (" with local changes" if changed else "")


def machine() -> dict:
    facts = {}
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cpu_family": facts.get("cpu family", ""),
        "cpu_model": facts.get("model", ""),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "kernel": platform.release(),
        "load_at_start": os.getloadavg()[0],
    }


def timed_rows(rounds: list[list[dict]]) -> dict[tuple, dict]:
    """(model, tokens, implementation) -> the row of the run with the median time."""
    by_key: dict[tuple, list[dict]] = {}
    for rows in rounds:
        seen = set()
        for row in rows:
            if "ms_mean" not in row:
                continue
            key = (row["model"], row["tokens"], row.get("implementation", "conclave"))
            if key in seen:
                raise SystemExit(f"compare_peers: two rows for {key} in one run; narrow the options")
            seen.add(key)
            by_key.setdefault(key, []).append(row)
    return {key: sorted(rows, key=lambda row: row["ms_mean"])[(len(rows) - 1) // 2] for key, rows in by_key.items()}


def share(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def summarise(our_rounds: list[list[dict]], peer_rounds: list[list[dict]]) -> list[dict]:
    """One entry per model and token count that both sides measured."""
    ours, peers = timed_rows(our_rounds), timed_rows(peer_rounds)
    summary = []
    for (model, tokens, _), row in ours.items():
        rivals = {key[2]: rival for key, rival in peers.items() if key[:2] == (model, tokens)}
        if not rivals:
            continue
        best = min(rivals, key=lambda name: rivals[name]["ms_mean"])
        times = [r["ms_mean"] for rows in our_rounds for r in rows if (r["model"], r["tokens"]) == (model, tokens)]
        summary.append({
            "model": model,
            "tokens": tokens,
            "threads": row["threads"],
            "isa": row.get("isa"),
            "arithmetic": row.get("arithmetic"),
            "ms": row["ms_mean"],
            "ms_spread": statistics.stdev(times) if len(times) > 1 else 0.0,
            "gflops": row["gflops"],
            "gbps": row["gbps"],
            "read_share": share(row["gbps"], row.get("read_ceiling_gbps")),
            "fma_share": share(row["gflops"], row.get("fma_ceiling_gflops")),
            "best_peer": best,
            "best_peer_ms": rivals[best]["ms_mean"],
            "ratio": rivals[best]["ms_mean"] / row["ms_mean"],
            "peer_ms": {name: rival["ms_mean"] for name, rival in rivals.items()},
        })
    return sorted(summary, key=lambda entry: (entry["model"], entry["tokens"]))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def to_markdown(report: dict) -> str:
    host = report["machine"]
    lines = [
        f"# Conclave against transformers' CPU experts, {report['date']}",
        "",
        f"- Machine: {host['cpu']} (family {host['cpu_family']}, model {host['cpu_model']}), {host['cores']} cores,"
        f" {host['memory_gib']} GiB, Linux {host['kernel']}, load {host['load_at_start']:.2f} at the start",
        f"- Commit: {report['commit']}",
        f"- Peer: transformers {report['transformers']}, torch {report['torch']}, bf16",
        f"- Command: `{report['command']}`",
        f"- {report['rounds']} rounds, ours and theirs in turn; times are the median round's mean",
        "",
        "| model | tokens | threads | arithmetic | ms ± between rounds | GFLOP/s | GB/s | of read ceiling"
        " | of multiply-add ceiling | best peer | its ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        arithmetic = " ".join(str(part) for part in (row["isa"], row["arithmetic"]) if part)
        lines.append(
            f"| {row['model']} | {row['tokens']} | {row['threads']} | {arithmetic}"
            f" | {row['ms']:.3f} ± {row['ms_spread']:.3f} | {row['gflops']:.1f} | {row['gbps']:.2f}"
            f" | {percent(row['read_share'])} | {percent(row['fma_share'])}"
            f" | {row['best_peer']} | {row['best_peer_ms']:.3f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conclave", type=pathlib.Path, default=DEFAULT_BINARY, help="the tool to measure")
    parser.add_argument("--peer", type=pathlib.Path, default=PEER, help="the peer script")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,16,64,256,1024")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions inside one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program")
    parser.add_argument("--implementations", default="eager,batched_mm,grouped_mm")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench/results")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("at least one round")
    return options


def main() -> int:
    options = parse_arguments()
    shared = ["--model", options.model, "--tokens", options.tokens, "--threads", str(options.threads)]
    shared += ["--repetitions", str(options.repetitions), "--format", "jsonl"]
    our_command = [str(options.conclave), "bench", *shared]
    peer_command = [sys.executable, str(options.peer), *shared, "--implementations", options.implementations]

    report = {"date": datetime.date.today().isoformat(), "machine": machine(), "commit": commit()}
    our_rounds, peer_rounds = [], []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}: conclave, then transformers", file=sys.stderr, flush=True)
        our_rounds.append(run_jsonl(our_command))
        peer_rounds.append(run_jsonl(peer_command))

    any_peer = peer_rounds[0][0] if peer_rounds[0] else {}
    report |= {
        "command": shlex.join(["python3", "bench/compare_peers.py", *sys.argv[1:]]),
        "torch": any_peer.get("torch"),
        "transformers": any_peer.get("transformers"),
        "rounds": options.rounds,
        "summary": summarise(our_rounds, peer_rounds),
        "conclave_rows": our_rounds,
        "peer_rows": peer_rounds,
    }
    if not report["summary"]:
        raise SystemExit("compare_peers: no token count was measured by both sides")

    slug = re.sub(r"[^a-z0-9]+", "-", report["machine"]["cpu"].lower()).strip("-")
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"{report['date']}-{slug}"
    stem.with_name(stem.name + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    markdown = to_markdown(report)
    stem.with_name(stem.name + ".md").write_text(markdown, encoding="utf-8")
    print(markdown, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
