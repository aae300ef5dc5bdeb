"""What became of a module's calls: computed by the library, or by the module's own code and why."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter

import torch

from conclave._locks import ForkSafeLock


@dataclasses.dataclass
class Tally:
    """Calls of one module."""

    ours: int = 0
    eager: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    traced: set[str] = dataclasses.field(default_factory=set)  # why graphs have its own code


_tallies: weakref.WeakKeyDictionary[torch.nn.Module, Tally] = weakref.WeakKeyDictionary()
_lock = ForkSafeLock()


def tally_of(module: torch.nn.Module) -> Tally:
    """A copy: what there was until now."""
    with _lock.now:
        found = _tallies.get(module, Tally())
        return Tally(found.ours, Counter(found.eager), set(found.traced))


def note_ours(module: torch.nn.Module) -> None:
    with _lock.now:
        _tallies.setdefault(module, Tally()).ours += 1


def note_eager(module: torch.nn.Module, reason: str) -> None:
    with _lock.now:
        _tallies.setdefault(module, Tally()).eager[reason] += 1


@torch.compiler.assume_constant_result
def note_traced(key: int, reason: str) -> None:
    """That a graph was made in which the module of this id runs its own code. torch.compile calls
    this while it makes the graph, maybe more than once; calls of the graph are not seen."""
    for module in gc.get_objects():
        if id(module) == key:
            with _lock.now:
                _tallies.setdefault(module, Tally()).traced.add(reason)
            return


def forget_calls(model: torch.nn.Module) -> None:
    """Counts from here on."""
    with _lock.now:
        for module in model.modules():
            _tallies.pop(module, None)
