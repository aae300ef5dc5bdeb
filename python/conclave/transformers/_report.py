"""What became of the forwards of a model's experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from conclave.transformers._dispatch import IMPLEMENTATION, dispatches, experts_of, is_replaced
from conclave.transformers._find import Candidate
from conclave.transformers._tally import Tally, tally_of


@dataclasses.dataclass(frozen=True)
class ExpertsCalls:
    """The experts of one block and who computed them."""

    path: str  # "model.layers.0.mlp.experts"; of a replaced block its own
    module: str  # the name of its class
    selected: str  # "backend", "block"; "": the library is not asked
    calls: int  # forwards that the library computed
    eager_calls: int  # forwards that the module's own code computed, of those seen
    reasons: tuple[str, ...]  # why the own code ran, or will run

    @property
    def runs(self) -> str:
        """ "conclave", "eager" or "both", by what was seen; "": nothing was."""
        if self.calls and self.eager_calls:
            return "both"
        return "conclave" if self.calls else "eager" if self.eager_calls else ""

    def __str__(self) -> str:
        counts = f"{self.calls} calls here, {self.eager_calls} eager"
        state = self.runs or ("not called yet" if self.selected else "not ours")
        reasons = ": " + "; ".join(self.reasons) if self.reasons else ""
        return f"{self.path}  {self.module}  {state} ({counts}){reasons}"


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """What `backend_report` found; `print` shows a line for each module."""

    modules: tuple[ExpertsCalls, ...]

    @property
    def ours(self) -> tuple[ExpertsCalls, ...]:
        """Those whose forwards were all computed by the library."""
        return tuple(m for m in self.modules if m.runs == "conclave" and not m.reasons)

    @property
    def fell_back(self) -> tuple[ExpertsCalls, ...]:
        """Those whose own code ran although the library was asked."""
        return tuple(m for m in self.modules if m.selected and m.reasons)

    @property
    def not_reached(self) -> tuple[ExpertsCalls, ...]:
        """Those that the library is not asked to compute."""
        return tuple(m for m in self.modules if not m.selected)

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules)) or "no experts"


def _reasons(tally: Tally) -> Iterator[str]:
    for reason, count in tally.eager.items():
        yield f"{count} x {reason}"
    for reason in tally.traced:
        yield f"in compiled graphs, whose calls are not counted: {reason}"


def _calls(path: str, module: torch.nn.Module, selected: str, why_not: str) -> ExpertsCalls:
    tally = tally_of(module)
    return ExpertsCalls(
        path=path,
        module=type(module).__name__,
        selected=selected,
        calls=tally.ours,
        eager_calls=tally.eager.total(),
        reasons=(*_reasons(tally), *([why_not] if why_not else [])),
    )


def _of_candidate(candidate: Candidate, path: str) -> ExpertsCalls:
    block, experts = candidate.block, candidate.experts
    if is_replaced(block):
        return _calls(candidate.path, block, "block", "")
    if is_replaced(experts):
        return _calls(path, experts, "block", "")
    if not dispatches(experts):
        return _calls(
            path, experts, "", "it does not dispatch; conclave.transformers.patch may replace it"
        )
    name = getattr(getattr(experts, "config", None), "_experts_implementation", IMPLEMENTATION)
    if name != IMPLEMENTATION:
        return _calls(path, experts, "", f'experts_implementation is "{name}"')
    return _calls(path, experts, "backend", "")


def backend_report(model: Any) -> BackendReport:
    """Which experts of a model the library computed, and why others ran eagerly.

    It says what happened in the forwards since the backend was selected (`set_implementation`), or
    blocks were replaced (`patch`), or else since the model was made. Forwards of a compiled graph
    are counted where the library computes them; where a graph holds the module's own code, it is
    named with the reason, and its calls are not counted.
    """
    paths = {module: path for path, module in model.named_modules()}
    return BackendReport(tuple(_of_candidate(c, paths[c.experts]) for c in experts_of(model)))
