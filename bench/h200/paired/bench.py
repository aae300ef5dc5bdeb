"""The command: python3 bench/h200/paired_bench.py."""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

from .cases import DEFAULT_CASES, TOKENS, cells_in_order, parse_case
from .plugin import find

DEFAULT_PEERS = "ours,vllm_triton,deepgemm,grouped_mm"
OURS = "ours"
SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "paired_bench.py"
CELL_SECONDS = 8.0  # none is begun with less left


class Sink:
    """JSON lines, as they come: to a file and to the output."""

    def __init__(self, path: str | None):
        self._file = open(path, "a", encoding="utf-8") if path else None

    def __call__(self, **fields) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        if self._file:
            self._file.write(line + "\n")
            self._file.flush()


def commit() -> str:
    here = pathlib.Path(__file__).resolve().parent
    found = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def machine(given_commit: str | None) -> dict:
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "machine", "device": properties.name, "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
        "python": platform.python_version(), "commit": given_commit or commit(),
    }


def done_cells(paths: list) -> set:
    """(case, tokens) that earlier runs timed."""
    done = set()
    for path in paths:
        for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line) if line.startswith("{") else {}
            if row.get("kind") == "cell":
                done.add((row["case"], row["tokens"]))
    return done


def arguments_without(peer: str, options, seconds: float) -> list | None:
    """The command line of a process that goes on without a peer; None where nothing is left to compare."""
    left = [name for name in options.peers.split(",") if pathlib.Path(name).stem != peer]
    if not options.out or not left or peer == OURS or seconds < CELL_SECONDS:
        return None
    # An option that is given twice counts the second time; --skip adds up.
    return ["--peers", ",".join(left), "--limit", f"{seconds:.1f}", "--precompile", "0", "--skip", options.out]


def restart_without(peer: str, options, emit) -> None:
    """Becomes a new process: this one's GPU is lost, and a faulty peer must not take the others' cells with it."""
    more = arguments_without(peer, options, options.began + options.limit - time.time())
    if more is None:
        emit(kind="end", complete=False, reason=f"the GPU is lost to this process through {peer}")
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *sys.argv[1:], *more])


def run(options, emit) -> None:
    import torch

    from .cell import GpuLost, is_fatal, run_cell
    from .plugin import one_line
    from .problem import Problem, Weights

    end = options.began + options.limit
    peers = [find(name) for name in options.peers.split(",")]
    for peer in peers:
        emit(kind="peer", peer=peer.name, title=peer.title, what=peer.what, formats=peer.formats, absent=peer.reason)
    done = done_cells(options.skip)
    cases = [parse_case(name) for name in options.cases.split(",")]
    for case, tokens_list in cells_in_order(cases, [int(t) for t in options.tokens.split(",")]):
        tokens_list = [t for t in tokens_list if (case.name, t) not in done]
        if not tokens_list or time.time() > end - CELL_SECONDS:
            continue
        torch.cuda.empty_cache()
        begun = time.time()
        weights = Weights(case)
        torch.cuda.synchronize()
        print(f"# {case.name}: weights in {time.time() - begun:.1f} s, {end - time.time():.0f} s left", flush=True)
        for tokens in tokens_list:
            if time.time() > end - CELL_SECONDS:
                break
            try:
                run_cell(peers, Problem(case, tokens, weights), options, emit, lambda: time.time() > end - CELL_SECONDS)
            except GpuLost as error:
                emit(kind="failed", peer=error.peer, case=case.name, tokens=tokens, reason=f"lost the GPU: {error}")
                restart_without(error.peer, options, emit)
            except Exception as error:
                emit(kind="failed", case=case.name, tokens=tokens, reason=one_line(error))
                if is_fatal(error):
                    emit(kind="end", complete=False, reason="the GPU is lost to this process")
                    sys.exit(1)
        del weights
    emit(kind="end", complete=time.time() < end - CELL_SECONDS, seconds=round(time.time() - options.began, 1))


def compile_first(options) -> None:
    """Fills the caches of engines that compile at run time, by a process a case, all at once."""
    begun = time.time()
    command = [sys.executable, str(SCRIPT), "--peers", options.peers, "--tokens", options.tokens, "--hot", "0.001", "--cool", "0",
               "--limit", str(options.precompile), "--precompile", "0"]
    processes = []
    for case in options.cases.split(","):
        processes.append(subprocess.Popen([*command, "--cases", case], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in processes:
        try:
            process.wait(max(1.0, begun + options.precompile + 5 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"# compiled in {time.time() - begun:.0f} s", flush=True)


def compile_only(options) -> None:
    """Fills the caches of engines that can do so without weights: most of the GPU's memory and time stays free."""
    from .plugin import load, one_line

    tokens = [int(t) for t in options.tokens.split(",")]
    compilers = [c for c in (getattr(load(name), "compile_ahead", None) for name in options.peers.split(",")) if c]
    for case in map(parse_case, options.cases.split(",")):
        for compiler in compilers:
            try:
                compiler(case, tokens)
            except Exception as error:
                print(f"# {case.name}: {one_line(error)}", flush=True)
        print(f"# {case.name} compiled after {time.time() - options.began:.0f} s", flush=True)


def parse(arguments: list | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paired_bench.py", description="Our layer and other engines, in pairs.")
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help="names, or ExkxHxI[:format]")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", default=DEFAULT_PEERS, help="names of bench/h200/paired/peers, or paths of plug-ins")
    parser.add_argument("--hot", type=float, default=2.0, help="seconds of load a cell, half of them timed")
    parser.add_argument("--cool", type=int, default=3, help="single replays a subject after rest")
    parser.add_argument("--rest", type=float, default=0.25, help="seconds before each of those")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--precompile", type=float, default=0.0, help="seconds for compiling in parallel first, a process a case")
    parser.add_argument("--compile-only", action="store_true", help="fill the caches of engines that compile ahead, then end")
    parser.add_argument("--skip", action="append", default=[], help="results whose cells are not timed again")
    parser.add_argument("--commit", help="of what is measured, where git does not tell")
    parser.add_argument("--out", help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    options.began = time.time()
    return options


def main() -> None:
    options = parse()
    if options.compile_only:
        compile_only(options)
        return
    if options.precompile:
        compile_first(options)
    emit = Sink(options.out)
    emit(**machine(options.commit))
    run(options, emit)
