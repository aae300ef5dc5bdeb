"""One cell: every peer's candidates made, checked, the fastest chosen, then all timed together."""

import random
import statistics as std
import time

import torch

from .alternation import time_cool, time_hot
from .device import CudaDevice, Graph
from .plugin import Peer, one_line
from .problem import Problem
from .statistics import spread

CHOICE_REPLAYS = 5


class GpuLost(Exception):
    """This process can do nothing more on the GPU, through work of `peer`."""

    def __init__(self, peer: str, error: Exception):
        super().__init__(one_line(error))
        self.peer = peer


def choose(peer: Peer, problem: Problem, out_of_time) -> tuple:
    """(label, graph, error) of a peer's fastest right candidate, and what is to be said of the others."""
    best, notes = None, []
    limit = problem.case.weight_format.limit
    made = peer.candidates(problem)
    while not (best and out_of_time()):
        try:
            candidate = next(made, None)
            if candidate is None:
                break
            graph = Graph(candidate.run, problem.routings)
            error = candidate.error(graph.replay_into_poison())
        except Exception as error:
            if is_fatal(error):
                raise GpuLost(peer.name, error) from error
            notes.append(one_line(error))
            torch.cuda.empty_cache()
            continue
        if not error <= limit:
            notes.append(f"{candidate.label}: wrong, error {error:.2e} above {limit:.0e}")
            continue
        device = CudaDevice({"": graph})
        us = std.median(device.collect(device.enqueue([""] * CHOICE_REPLAYS)))
        if best is None or us < best[0]:
            best = (us, candidate.label, graph, error)
        del graph
    return best, notes


def is_fatal(error: Exception) -> bool:
    """Whether the process can do nothing more on the GPU."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def replay_each(chosen: dict) -> None:
    """Every graph alone and twice, all others made: a fault in the alternation would not show whose it is."""
    for name, graph in [*chosen.items(), *chosen.items()]:
        try:
            graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise GpuLost(name, error) from error


def run_cell(peers: list, problem: Problem, options, emit, out_of_time) -> None:
    case, tokens = problem.case, problem.tokens
    begun = time.monotonic()
    here = {"case": case.name, "format": case.format, "tokens": tokens}
    chosen, about = {}, {}
    for peer in peers:
        if case.format not in peer.formats:
            emit(kind="absent", peer=peer.name, reason=f"does not run {case.format}", **here)
            continue
        if case.gpt_oss and not peer.gpt_oss:
            emit(kind="absent", peer=peer.name, reason="does not add biases", **here)
            continue
        if peer.candidates is None:
            emit(kind="absent", peer=peer.name, reason=peer.reason, **here)
            continue
        best, notes = choose(peer, problem, out_of_time)
        for note in notes:
            emit(kind="note", peer=peer.name, note=note, **here)
        if best is None:
            emit(kind="absent", peer=peer.name, reason=notes[-1] if notes else "has nothing for this cell", **here)
            continue
        _, label, chosen[peer.name], error = best
        about[peer.name] = {"label": label, "error": float(f"{error:.2e}")}
    if not chosen:
        return
    replay_each(chosen)
    made = time.monotonic() - begun
    rng = random.Random(tokens)
    device = CudaDevice(chosen)
    hot = time_hot(device, list(chosen), options.hot, rng)
    cool = time_cool(device, list(chosen), options.cool, options.rest, rng) if options.cool else {}
    for name in chosen:
        emit(
            kind="cell", peer=name, **here, **about[name], hot=spread(hot[name]).as_row(),
            cool=spread(cool[name]).as_row() if cool else None, routings=problem.routings,
            active_experts=round(problem.active_experts, 2), active_bytes=round(problem.active_bytes),
            flops=case.flops(tokens), prepare_s=round(made, 2),
        )
