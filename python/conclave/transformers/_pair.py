"""Router and experts that a decoder layer calls one after the other, the router on another input.

The router's stand-in hands its input on in the place of ids and weights; that of the experts has
then both inputs, and does all of the work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from conclave._locks import ForkSafeLock
from conclave._watched import Watched
from conclave.layer import Layer
from conclave.transformers._eplb import BlockPlacing
from conclave.transformers._experts import experts_forward, logger, why_gradients
from conclave.transformers._feed import first_that_fits, make_layer
from conclave.transformers._find import Candidate, router_of
from conclave.transformers._packed import packed_experts, require_countable
from conclave.transformers._probe import call_original, probe_hidden, require_equal
from conclave.transformers._refitted import RefittedBlock
from conclave.transformers._release import modules_with_tied_weights, require_weights
from conclave.transformers._slots import Slots
from conclave.transformers._tally import note_ours
from conclave.transformers._traits import NotOurs
from conclave.transformers._wiring import is_parametrized


class PatchedPair:
    """Stands in for the forwards of a router and of an experts module."""

    def __init__(
        self,
        model: Any,
        candidate: Candidate,
        whole: Any = None,
        placing: BlockPlacing | None = None,
    ) -> None:
        self._placing = placing
        router = router_of(candidate.block)
        if router is None:
            raise NotOurs("no router stands beside the experts")
        self._router: Any = weakref.ref(router)
        self._experts: Any = weakref.ref(candidate.experts)
        self._model: Any = weakref.ref(model)
        self._whole: Any = weakref.ref(model if whole is None else whole)
        self._route, self._mix = router.forward, candidate.experts.forward
        names = {module: name for name, module in candidate.block.named_children()}
        self._parts = [f"{candidate.path}.{names[m]}" for m in (router, candidate.experts)]
        self._warned = False
        self._lock = ForkSafeLock()
        self.released_bytes = 0
        first_that_fits(lambda names: self._try(names, candidate))

    def _try(self, names: Callable, candidate: Candidate) -> None:
        self._names = names
        self._pack()
        self._probe(candidate)

    def _pack(self) -> None:
        experts = self._experts()
        slots = Slots((*self._router().modules(), *experts.modules()))
        tensors = slots.tensors()
        require_countable(tensors)
        watched = Watched(tensors)  # before: what is written meanwhile is packed again
        device = next(experts.parameters()).device
        counts = self._placing is not None
        made = make_layer(
            self._model(), self._parts, device, self._names, alone=True, counts=counts
        )
        self.layer: Layer = made.layer
        self._slots = slots
        self._watched = watched  # last: who finds it current finds its layer

    def _fresh_layer(self) -> Layer:
        """The layer, packed again where the model's weights have changed since."""
        if self._watched.is_current(self._slots.tensors()):
            return self.layer
        with self._lock.now:
            if not self._watched.is_current(self._slots.tensors()):
                require_weights(self._experts())
                self._pack()
                if self.released_bytes:
                    self.release()
        return self.layer

    def pack_again(self) -> None:
        """Now, if the model's weights have changed since."""
        self._fresh_layer()

    def refitted(self) -> RefittedBlock:
        """For weights that are packed beside those that serve."""
        return RefittedBlock(self, self._model(), tuple(self._parts), self._names)

    def _probe(self, candidate: Candidate) -> None:
        size = self.layer.spec.hidden_size
        raw = probe_hidden(candidate.experts, size)[0]
        hidden = probe_hidden(candidate.experts, size, seed=6)[0]
        with torch.no_grad():
            routed = call_original(self._route, raw)
            if not isinstance(routed, tuple) or len(routed) != 3:
                raise NotOurs("the router does not return scores, weights and ids")
            expected = call_original(self._mix, hidden, routed[2], routed[1])
            require_equal(self._run(hidden, raw), expected)

    def _run(self, hidden: torch.Tensor, router_input: torch.Tensor) -> torch.Tensor:
        layer = self._fresh_layer()
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
        raw = router_input.detach().reshape(-1, hidden.shape[-1]).contiguous()
        return layer.forward(rows, router_input=raw).view(hidden.shape)

    def _is_simple(self, hidden: torch.Tensor) -> bool:
        """Whether nothing but the result is wanted: no gradients, no graph, nobody listening."""
        if torch.compiler.is_compiling() or self._router()._forward_hooks:
            return False
        if is_parametrized(self._router()) or is_parametrized(self._experts()):
            return False
        if not torch.is_grad_enabled():
            return True
        weights = {f"weights[{i}]": t for i, t in enumerate(self._slots.values())}
        reason = why_gradients({"hidden_states": hidden} | weights)
        if reason and not self._warned:
            self._warned = True
            logger.warning("MoE blocks run eagerly: %s", reason)
        return not reason

    def route(self, hidden_states: torch.Tensor) -> Any:
        """In place of the router."""
        if self._is_simple(hidden_states):
            return hidden_states, hidden_states, hidden_states
        return self._route(hidden_states)

    def mix(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """In place of the experts."""
        if top_k_index.is_floating_point():
            if self._is_simple(hidden_states):
                out = self._run(hidden_states, top_k_index)
                note_ours(self._experts())
                return out
            # Only the rows of the experts require gradients: the router's input came without.
            _, top_k_weights, top_k_index = self._route(top_k_index)
        return experts_forward(self._experts(), hidden_states, top_k_index, top_k_weights)

    def install(self) -> None:
        self._router().forward = self.route
        self._experts().forward = self.mix

    def remove(self) -> None:
        for module in (self._router(), self._experts()):
            module.__dict__.pop("forward", None)

    def release(self) -> int:
        """Frees the experts' own copy. Where they are called without the pair's router, they run on
        this layer too."""
        experts = self._experts()
        if experts in modules_with_tied_weights(self._whole()):
            return 0
        try:
            packed = packed_experts(experts, self.layer.spec.hidden_size)
        except NotOurs:
            return 0
        self.released_bytes = packed.adopt(experts, self.layer)
        self._watched = Watched(self._slots.tensors())
        return self.released_bytes

    def packed_bytes(self) -> int:
        return int(self.layer.plan["packed_bytes"])
