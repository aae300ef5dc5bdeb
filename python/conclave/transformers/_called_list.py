"""A list of experts that has a forward of its own, as code for transformers 4.57 and Switch have
it: the block hands it rows and choices, so that nothing about the router has to be found out."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

from conclave._locks import ForkSafeLock
from conclave._watched import Watched
from conclave.errors import ConclaveRuntimeError
from conclave.layer import Layer
from conclave.spec import LayerOptions
from conclave.transformers._experts import logger, why_gradients
from conclave.transformers._find import Candidate
from conclave.transformers._list_experts import ListTraits, read_list
from conclave.transformers._packed import max_tokens, require_countable
from conclave.transformers._probe import call_original, probe_hidden, require_equal
from conclave.transformers._release import free, modules_with_tied_weights, require_weights
from conclave.transformers._slots import Slots
from conclave.transformers._tally import note_eager, note_ours, note_traced
from conclave.transformers._traits import NotOurs

_Choices = tuple[torch.Tensor, torch.Tensor]  # ids, of which -1 is none, and weights [T, k]


def has_forward(experts: torch.nn.Module) -> bool:
    """Whether a list can be called; one of torch's own cannot."""
    plain = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return isinstance(experts, plain) and not any(
        type(experts).forward is kind.forward for kind in plain
    )


def _ids_of(tensor: torch.Tensor, experts: int) -> torch.Tensor | None:
    """[T, k] from ids, or from ones in the place of each slot's expert, [T, k, E]."""
    if tensor.is_floating_point():
        return None
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() != 3 or tensor.shape[-1] != experts:
        return None
    return torch.where(tensor.amax(-1) > 0, tensor.argmax(-1), -1)


def choices_in(given: tuple[Any, ...], tokens: int, experts: int) -> _Choices | None:
    """What a call's arguments behind the rows say, in either order; None for anything else."""
    if len(given) != 2 or not all(isinstance(t, torch.Tensor) for t in given):
        return None
    for first, weights in (given, given[::-1]):
        ids = _ids_of(first, experts)
        if ids is not None and weights.is_floating_point() and ids.shape == weights.shape:
            return (ids, weights) if len(ids) == tokens else None
    return None


class PatchedCalls:
    """Stands in for the forward of one list of experts."""

    def __init__(self, model: Any, candidate: Candidate) -> None:
        experts = candidate.experts
        self._experts: Any = weakref.ref(experts)
        self._model: Any = weakref.ref(model)
        self._original = experts.forward
        self._lock = ForkSafeLock()
        self._warned = False
        self.released_bytes = 0
        self._traits: ListTraits = read_list(experts)
        self._count = len(list(experts.children()))
        self._probe(candidate)

    # Against the original

    def _probe(self, candidate: Candidate) -> None:
        """Runs the block, and compares what it asked of its experts."""
        hidden = probe_hidden(candidate.block, self._traits.hidden_size)
        with torch.no_grad():
            calls = self._listen(candidate, hidden)
            if len(calls) != 1:
                raise NotOurs(f"the block called its experts {len(calls)} times, not once")
            rows, choices = self._read(*calls[0])
            if choices is None:
                raise NotOurs("the block calls its experts with other than rows, ids and weights")
            self._top_k = choices[0].shape[-1]
            self._pack(rows.device)
            require_equal(self._run(rows, choices), self._original(*calls[0]))

    def _listen(self, candidate: Candidate, hidden: torch.Tensor) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def listen(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append((*args, *kwargs.values()))
            return self._original(*args, **kwargs)

        experts: Any = candidate.experts
        former = experts.__dict__.get("forward")
        experts.forward = types.MethodType(listen, experts)
        try:
            call_original(candidate.block.forward, hidden)
        finally:
            del experts.forward
            if former is not None:
                experts.forward = former
        return calls

    def _read(self, rows: Any, *given: Any) -> tuple[Any, _Choices | None]:
        if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            return rows, None
        return rows, choices_in(given, len(rows), self._count)

    # Weights

    def _pack(self, device: torch.device) -> None:
        slots = Slots(self._experts().modules())
        tensors = slots.tensors()
        require_countable(tensors)
        watched = Watched(tensors)  # before: what is written meanwhile is packed again
        options = LayerOptions(max_tokens=max_tokens(device), id_policy="skip")
        self.layer: Layer = self._traits.layer(self._experts(), self._top_k, options)
        self._slots = slots
        self._watched = watched  # last: who finds it current finds its layer

    def _fresh_layer(self, device: torch.device) -> Layer:
        if self._watched.is_current(self._slots.tensors()):
            return self.layer
        with self._lock.now:
            if not self._watched.is_current(self._slots.tensors()):
                for module in self._experts().modules():
                    require_weights(module)
                self._pack(device)
                if self.released_bytes:
                    self.release()
        return self.layer

    def refitted(self) -> None:
        """Its arrays are read from modules, so that they are packed when these have the values."""
        return

    def pack_again(self) -> None:
        """Now, if the modules' weights have changed since."""
        self._fresh_layer(next(self._experts().parameters()).device)

    # Running

    def _run(self, rows: torch.Tensor, choices: _Choices) -> torch.Tensor:
        layer = self._fresh_layer(rows.device)
        ids, weights = choices
        return layer.forward(
            rows.detach().contiguous(),
            topk_ids=ids.contiguous(),
            topk_weights=weights.detach().float().contiguous(),
        )

    def _why_not(self, rows: Any, choices: _Choices | None) -> str:
        if choices is None or choices[0].shape[-1] != self._top_k:
            return "the experts were called with other than rows, ids and weights"
        if not torch.is_grad_enabled():
            return ""
        weights = {f"weights[{i}]": t for i, t in enumerate(self._slots.values())}
        return why_gradients({"hidden_states": rows, "top_k_weights": choices[1]} | weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """With the arguments and the result of the original."""
        module = self._experts()
        if torch.compiler.is_compiling():
            self._refuse_if_released("it is compiled")
            note_traced(id(module), "lists of experts are compiled with the model's own code")
            return self._original(*args, **kwargs)
        rows, choices = self._read(*args, *kwargs.values())
        reason = self._why_not(rows, choices)
        if reason:
            self._refuse_if_released(reason)
            if not self._warned:
                self._warned = True
                logger.warning("experts run eagerly: %s", reason)
            note_eager(module, reason)
            return self._original(*args, **kwargs)
        note_ours(module)
        return self._run(rows, choices)  # type: ignore[arg-type]

    def _refuse_if_released(self, reason: str) -> None:
        if self.released_bytes:
            name = type(self._experts()).__name__
            raise ConclaveRuntimeError(f"{name}: {reason}, and its weights were released")

    # Placing

    def install(self) -> None:
        self._experts().forward = self.forward

    def remove(self) -> None:
        self._experts().__dict__.pop("forward", None)

    def release(self) -> int:
        """Frees the experts' own copies; codes of quantisers stay, whose modules hold more."""
        if self._traits.in_own_form:
            return 0
        kept = modules_with_tied_weights(self._model())
        modules = [m for m in self._experts().modules() if m not in kept]
        self.released_bytes = sum(free(m, list(m._parameters)) for m in modules)
        self._watched = Watched(self._slots.tensors())
        return self.released_bytes

    def packed_bytes(self) -> int:
        return int(self.layer.plan["packed_bytes"])
