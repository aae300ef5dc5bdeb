"""A block whose experts are modules of a list, of a family that the library has no table for.

The block goes on calling its router and its shared experts; what its code does with them is found
out by comparing results, and the routed experts are one layer of the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conclave._watched import Watched
from conclave.routing import route
from conclave.spec import LayerOptions, RouterSpec
from conclave.transformers._block import PatchedBlock
from conclave.transformers._find import Candidate
from conclave.transformers._list_experts import ListTraits, read_list
from conclave.transformers._packed import max_tokens, require_countable
from conclave.transformers._probe import (
    TOKENS,
    bar_of,
    call_original,
    differ_by,
    probe_hidden,
    require_equal,
)
from conclave.transformers._release import free, modules_with_tied_weights
from conclave.transformers._slots import Slots
from conclave.transformers._traits import NotOurs

_TOP_K = ("top_k", "num_experts_per_tok", "topk", "moe_topk", "moe_k", "k", "num_selected_experts")
_Routed = tuple[torch.Tensor, torch.Tensor]  # ids and weights [T, k]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How logits become choices; no spec: the router's module chooses."""

    top_k: int
    spec: RouterSpec | None = None
    bias: str = ""  # of the router: added to scores to choose, not to weigh


def _outputs(found: Any) -> list[torch.Tensor]:
    """What a router's module returns, a row for each token."""
    tensors = found if isinstance(found, tuple) else (found,)
    return [t.reshape(-1, t.shape[-1]) for t in tensors if isinstance(t, torch.Tensor) and t.dim()]


def _choice_in(outputs: list[torch.Tensor], tokens: int) -> _Routed | None:
    """Ids and weights among the outputs, if they are there."""
    ids = [t for t in outputs if not t.is_floating_point() and t.shape[0] == tokens]
    for chosen in ids[:1]:
        for weights in outputs:
            if weights.is_floating_point() and weights.shape == chosen.shape:
                return chosen, weights
    return None


def _is_positive(value: Any, kind: type[int] | type[float]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0


def _numbers(names: tuple[str, ...], kind: type[int] | type[float], *owners: Any) -> list[Any]:
    """Attributes whose name is one of, or for floats contains one of, the names."""
    found: dict[Any, None] = {}
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            fits = name in names if kind is int else any(part in name for part in names)
            if fits and _is_positive(value, kind):
                found.setdefault(value)
    return list(found)


class PatchedList(PatchedBlock):
    """Stands in for the forward of one block with a list of experts."""

    _rule: _Rule
    _shared: str

    # Finding out

    def _fit(self, candidate: Candidate, device: torch.device) -> str | None:
        gate = self._router
        if gate is None:
            raise NotOurs("no router stands beside the experts")
        self._router = None  # it is called by every forward, so that listeners hear it
        self._gate: Any = weakref.ref(gate)
        self._experts: Any = weakref.ref(candidate.experts)
        self._config = getattr(self._model(), "config", None)
        self._all = Slots(candidate.block.modules())
        self._is_hashed = False
        self._traits: ListTraits = read_list(candidate.experts)
        # Packed experts have no type of their own; scales may have another than the model.
        owner = candidate.block if self._traits.in_own_form else candidate.experts
        hidden = probe_hidden(owner, self._traits.hidden_size)
        with torch.no_grad():
            expected = call_original(self._original, hidden)
            return self._find(candidate, hidden, expected)

    def _find(self, candidate: Candidate, hidden: torch.Tensor, expected: Any) -> str | None:
        """The rule of the router and the use of the shared experts that come nearest."""
        first = expected[0] if isinstance(expected, tuple) else expected
        if not isinstance(first, torch.Tensor) or first.numel() != hidden.numel():
            raise NotOurs("the block does not return a row for each row")
        if first.dtype != hidden.dtype:
            raise NotOurs(f"the block returns {first.dtype} for {hidden.dtype}")
        ways = self._ways(candidate.block, hidden)
        best: tuple[float, _Rule, str] | None = None
        for rule in self._rules(candidate.block, hidden):
            if best is None or rule.top_k != self._rule.top_k:
                self._rule = rule
                self._pack(hidden.device)
            for shared in ways:
                self._rule, self._shared = rule, shared
                out, _ = self._run(hidden, None)
                error = differ_by(out, first)
                if best is None or error < best[0]:
                    best = error, rule, shared
        if best is None:
            raise NotOurs("nothing says how many experts each token has")
        _, self._rule, self._shared = best
        if self._rule.top_k != self.layer.spec.top_k:
            self._pack(hidden.device)
        out, seen = self._run(hidden, None)
        require_equal(out, first)
        name = self._name_second(expected, seen, bar_of(hidden))
        self.second_width = 0 if name is None else seen[name].shape[-1]
        return name

    def _rules(self, block: torch.nn.Module, hidden: torch.Tensor) -> Iterator[_Rule]:
        gate, count = self._gate(), len(list(self._experts().children()))
        outputs = self._call_gate(hidden)
        choice = _choice_in(outputs, TOKENS)
        if choice is not None:
            yield _Rule(choice[0].shape[-1])
            return
        if not outputs or tuple(outputs[0].shape) != (TOKENS, count):
            raise NotOurs(f"{type(gate).__name__} returns neither logits nor choices")
        owners = (block, gate, self._config)
        scales = [1.0, *(s for s in _numbers(("scal",), float, *owners) if s != 1.0)]
        tensors = (*gate.named_parameters(), *gate.named_buffers())
        biases = ["", *(n for n, t in tensors if t.shape == (count,) and n != "bias")]
        for top_k in _numbers(_TOP_K, int, *owners):
            if top_k > count:
                continue
            for score, renormalize, scale, bias in itertools.product(
                ("softmax", "sigmoid"), ("sum", "none"), scales, biases
            ):
                spec = RouterSpec(
                    score=score,
                    renormalize=renormalize,
                    scale=scale,
                    has_selection_bias=bool(bias),
                )
                yield _Rule(top_k, spec, bias)

    def _ways(self, block: torch.nn.Module, hidden: torch.Tensor) -> list[str]:
        """How what stands beside the experts may join them, by the names of children: not, as it
        is, or weighed by another child."""
        names: dict[int, list[str]] = {1: [], hidden.shape[-1]: []}
        for name, child in block.named_children():
            if child in (self._gate(), self._experts()):
                continue
            with contextlib.suppress(NotOurs):
                out = call_original(child, hidden)
                if isinstance(out, torch.Tensor) and out.shape[:-1] == hidden.shape[:-1]:
                    names.setdefault(out.shape[-1], []).append(name)
        gates, shared = names[1], names[hidden.shape[-1]]
        return ["", *shared, *(f"{g} {s}" for g, s in itertools.product(gates, shared))]

    # Weights

    def _modules(self, siblings: tuple[str, ...] | None = None) -> list[torch.nn.Module]:
        return list(self._experts().modules())

    def _pack(self, device: torch.device) -> None:
        slots = Slots(self._modules())
        tensors = slots.tensors()
        require_countable(tensors)
        watched = Watched(tensors)  # before: what is written meanwhile is packed again
        traits = self._traits
        options = LayerOptions(max_tokens=max_tokens(device), id_policy="skip")
        self.layer = traits.layer(self._experts(), self._rule.top_k, options)
        self._slots = slots
        self._watched = watched  # last: who finds it current finds its layer

    def refitted(self) -> None:
        """Its arrays are read from modules, so that they are packed when these have the values."""
        return

    def release(self) -> int:
        """Frees the experts' own copies; router and shared experts go on being called. Packed ones
        stay: their modules hold more than parameters."""
        if self._traits.in_own_form:
            return 0
        kept = modules_with_tied_weights(self._whole())
        freed = [free(m, list(m._parameters)) for m in self._modules() if m not in kept]
        self.released_bytes = sum(freed)
        self._watched = Watched(self._slots.tensors())
        return self.released_bytes

    def _required(self) -> list[torch.Tensor]:
        return self._all.values()

    # Running

    def _call_gate(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The router on hidden states as the block has them, or on rows where it wants these."""
        if not hasattr(self, "_gate_takes"):
            for shape in (lambda h: h, lambda h: h.reshape(-1, h.shape[-1])):
                try:
                    self._gate()(shape(hidden))
                except Exception as error:
                    reason = str(error)
                    continue
                self._gate_takes: Callable = shape
                break
            else:
                raise NotOurs(f"{type(self._gate()).__name__} does not run by itself: {reason}")
        return _outputs(self._gate()(self._gate_takes(hidden)))

    def _choose(self, outputs: list[torch.Tensor], tokens: int) -> _Routed:
        rule = self._rule
        if rule.spec is None:
            choice = _choice_in(outputs, tokens)
            if choice is None:
                raise NotOurs("the router returned no choices")
            return choice
        bias = None
        if rule.bias:
            bias = dict(self._gate().named_buffers()) | dict(self._gate().named_parameters())
            bias = bias[rule.bias].detach().float()
        weights, ids = route(outputs[0].contiguous(), rule.top_k, rule.spec, selection_bias=bias)
        return ids, weights

    def _run(
        self, hidden: torch.Tensor, token_ids: torch.Tensor | None, wants: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = hidden.detach()
        rows = hidden.reshape(-1, hidden.shape[-1])
        layer = self._fresh_layer(rows)
        with torch.no_grad():
            outputs = self._call_gate(hidden)
            ids, weights = self._choose(outputs, rows.shape[0])
            if self.routing is not None:
                ids, weights = self.routing.given(ids, weights)
            out = layer.forward(
                rows.contiguous(),
                topk_ids=ids.contiguous(),
                topk_weights=weights.float().contiguous(),
            ).view(hidden.shape)
            seen = {}
            if self._rule.spec is not None:
                seen["logits"] = outputs[0].float()
            return self._with_shared(out, hidden), seen

    def _with_shared(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        names = self._shared.split()
        if not names:
            return out
        *gate, shared = (self._module().get_submodule(name)(hidden) for name in names)
        if gate:
            shared = torch.sigmoid(gate[0]) * shared
        return out + shared
