"""A MoE block of a model, computed by the library."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from conclave._locks import ForkSafeLock
from conclave._watched import Watched
from conclave.errors import ConclaveRuntimeError, Error
from conclave.layer import Layer
from conclave.ranks import Communicator
from conclave.transformers._coded_traits import codes_of
from conclave.transformers._eplb import BlockPlacing
from conclave.transformers._experts import logger, why_gradients
from conclave.transformers._feed import first_that_fits, make_layer
from conclave.transformers._find import Candidate, router_of
from conclave.transformers._packed import require_countable
from conclave.transformers._probe import (
    TOKENS,
    bar_of,
    call_original,
    differ_by,
    probe_hidden,
    require_equal,
)
from conclave.transformers._refitted import RefittedBlock
from conclave.transformers._release import free, modules_with_tied_weights, require_weights
from conclave.transformers._slots import Slots
from conclave.transformers._split import split_of
from conclave.transformers._tally import note_eager, note_ours, note_traced
from conclave.transformers._traits import NotOurs
from conclave.transformers._wiring import Wiring

_blocks: weakref.WeakValueDictionary[int, PatchedBlock] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_Result = TypeVar("_Result")


def _zero_of_input(*args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of a shared expert that the block has added already."""
    hidden = next(itertools.chain(args, kwargs.values()))
    return hidden.new_zeros(()).expand_as(hidden)


class PatchedBlock:
    """Stands in for the forward of one block, on that instance."""

    routing: Any = None  # records or replays what the layer chooses (_recording)

    def __init__(
        self,
        model: Any,
        candidate: Candidate,
        whole: Any = None,
        placing: BlockPlacing | None = None,
    ) -> None:
        """`model` has the block's configuration, and is `whole` or a part of that."""
        self.path = candidate.path
        self._placing = placing
        self.released_bytes = 0
        self._model: Any = weakref.ref(model)
        self._whole: Any = weakref.ref(model if whole is None else whole)
        self._module: Any = weakref.ref(candidate.block)
        self._original = candidate.block.forward
        self._parameters = list(inspect.signature(self._original).parameters)
        self._router = router_of(candidate.block)
        self._wiring = Wiring(candidate.block)
        self._lock = ForkSafeLock()
        self.siblings: tuple[str, ...] = ()
        self._former: dict[str, Any] = {}
        weights = next(candidate.block.parameters())
        self._norm: torch.nn.Module | None = None
        self._split = split_of(model, candidate.path, candidate.block, candidate.experts, placing)
        self._second = self._fit(candidate, weights.device)
        self.key = next(_keys)
        _blocks[self.key] = self

    # Weights

    def _modules(self, siblings: tuple[str, ...] | None = None) -> list[torch.nn.Module]:
        paths = (self.path, *(self.siblings if siblings is None else siblings))
        roots = [self._model().get_submodule(path) for path in paths]
        return [module for root in roots for module in root.modules()]

    def _watch(self, siblings: tuple[str, ...]) -> tuple[Slots, Watched]:
        slots = Slots(self._modules(siblings))
        tensors = slots.tensors()
        require_countable(tensors)
        return slots, Watched(tensors)

    def _fit(self, candidate: Candidate, device: torch.device) -> str | None:
        """Packs and probes; the name of what the block returns as well. Raises NotOurs."""
        return first_that_fits(lambda names: self._try(names, candidate, device))

    def _try(self, names: Callable, candidate: Candidate, device: torch.device) -> str | None:
        self._names = names
        self._agree(lambda: self._pack(device))
        return self._agree(lambda: self._probe(candidate))

    def _agree(self, step: Callable[[], _Result]) -> _Result:
        """A step that every rank with a part of the block takes, or none. Raises NotOurs, or
        ConclaveCommError where another rank met an error that no step expects."""
        if self._split is None:
            return step()
        found, reason, failure = None, "", None
        try:
            found = step()
        except (NotOurs, Error) as error:
            reason = str(error)
        except BaseException as error:  # an interrupt too must not keep the others waiting
            failure = error
        self._split.require_all(reason, failure)
        return found  # type: ignore[return-value]

    def _pack(self, device: torch.device) -> None:
        # Before: what is written meanwhile is packed again.
        slots, watched = self._watch(self.siblings)
        made = make_layer(
            self._model(),
            [self.path],
            device,
            self._names,
            split=self._split,
            counts=self._placing is not None,
        )
        if made.parts[1:] != self.siblings:  # the first packing says which they are
            slots, watched = self._watch(made.parts[1:])
        self.layer: Layer = made.layer
        self.siblings = made.parts[1:]
        self._is_hashed = self.layer.spec.router.vocab_size > 0
        self._slots = slots
        self._watched = watched  # last: who finds it current finds its layer

    def _fresh_layer(self, hidden: torch.Tensor) -> Layer:
        """The layer, packed again where the model's weights have changed since."""
        if self._watched.is_current(self._slots.tensors()):
            return self.layer
        with self._lock.now:
            if not self._watched.is_current(self._slots.tensors()):
                for module in self._modules():
                    require_weights(module)
                if self._split is not None and self._split.placing is not None:
                    self._split.placing.keep(self.layer.slots)
                self._pack(hidden.device)
                if self.released_bytes:
                    self.release()
        return self.layer

    def pack_again(self) -> None:
        """Now, if the model's weights have changed since."""
        self._fresh_layer(next(self._module().parameters()))

    def refitted(self) -> RefittedBlock | None:
        """For weights that are packed beside those that serve; None where they are packed anew."""
        return RefittedBlock(self, self._model(), (self.path, *self.siblings), self._names)

    # Against the original

    def _probe(self, candidate: Candidate) -> str | None:
        """Compares with the original on a few tokens; the name of what it returns as well."""
        hidden = probe_hidden(candidate.block, self.layer.spec.hidden_size)
        extra = {}
        if self._is_hashed:
            token_ids = torch.arange(TOKENS, device=hidden.device)
            extra["input_ids"] = (token_ids % self.layer.spec.router.vocab_size)[None]
        with torch.no_grad():
            expected = call_original(self._original, hidden, **extra)
            first = expected[0] if isinstance(expected, tuple) else expected
            for path in self.siblings:
                first = first + self._model().get_submodule(path)(hidden)
            actual, seen = self._run(hidden, extra.get("input_ids"))
            self._find_norm(candidate.block, actual, first)
        name = self._name_second(expected, seen, bar_of(hidden))
        self.second_width = 0 if name is None else seen[name].shape[-1]
        return name

    def _find_norm(
        self, block: torch.nn.Module, actual: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Some blocks end with a norm that is not the layer's; it stays the framework's."""
        norms = [m for name, m in block.named_children() if "post" in name and "norm" in name]
        if len(norms) == 1 and differ_by(norms[0](actual), expected) <= bar_of(expected):
            self._norm = norms[0]
            return
        require_equal(actual, expected)

    @staticmethod
    def _name_second(expected: Any, seen: dict[str, torch.Tensor], bar: float) -> str | None:
        """What the second result is, by comparison; None where there is none."""
        if not isinstance(expected, tuple):
            return None
        if len(expected) == 2 and isinstance(expected[1], torch.Tensor):
            second = expected[1].double().reshape(TOKENS, -1)
            for name, tensor in seen.items():
                if second.shape == tensor.shape and (second - tensor).abs().median() <= bar:
                    return name
        raise NotOurs("the block returns more than hidden states and router scores")

    # Running

    def _run(
        self, hidden: torch.Tensor, token_ids: torch.Tensor | None, wants: bool = True
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
        layer = self._fresh_layer(rows)
        seen: dict[str, torch.Tensor] = {}
        arguments: dict[str, Any] = {}
        if wants:
            top_k = layer.spec.top_k
            count, make = rows.shape[0], rows.new_empty
            seen["logits"] = make(count, layer.num_logits, dtype=torch.float32)
            seen["ids"] = make(count, top_k, dtype=torch.int32)
            seen["weights"] = make(count, top_k, dtype=torch.float32)
            arguments = {f"captured_{name}": tensor for name, tensor in seen.items()}
        if self._is_hashed and token_ids is not None:
            arguments["token_ids"] = token_ids.reshape(-1)
        ranked = layer if self._split is None else self._split.over(layer)
        if self.routing is None:
            out = ranked.forward(rows, **arguments)
        else:
            out = self.routing.forward(ranked, rows, arguments)
        if wants:
            scores, ids = torch.zeros_like(seen["logits"]), seen.pop("ids").long()
            chosen = seen["weights"].masked_fill(ids < 0, 0)  # no expert is in that slot
            seen["scores"] = scores.scatter_add_(1, ids.clamp(min=0), chosen)
        out = out.view(hidden.shape)
        return out if self._norm is None else self._norm(out), seen

    def _required(self) -> list[torch.Tensor]:
        """The weights that gradients may be required of."""
        return self._slots.values()

    def _why_gradients(self, given: dict[str, Any]) -> str:
        if not torch.is_grad_enabled():
            return ""
        weights = {f"weights[{i}]": t for i, t in enumerate(self._required())}
        return why_gradients(given | weights)

    def _why_not(self, given: dict[str, Any]) -> str:
        """Why a call is the original's; empty if it is the layer's."""
        _, *others = given.values()
        token_ids = given.get("input_ids")
        if any(hasattr(value, "to_local") for value in given.values()):
            return "the block was called with DTensors"
        gradients = self._why_gradients(given)
        if gradients:
            return gradients
        # In a graph the operator asks, at every call.
        replaced = "" if torch.compiler.is_compiling() else self._wiring.why_other()
        if replaced:
            return replaced
        if any(o is not None and o is not token_ids and _says_something(o) for o in others):
            return "the block was called with further arguments"
        return ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """With the arguments and the results of the original."""
        if torch.compiler.is_compiling():
            return _forward_in_graph(self, args, kwargs)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        hidden, token_ids = next(iter(given.values())), given.get("input_ids")
        reason = self._why_not(given)
        if reason:
            self._refuse_if_released(reason)
            if reason not in _warned:
                _warned.add(reason)
                logger.warning("MoE blocks run eagerly: %s", reason)
            note_eager(self._module(), reason)
            return self._eager(args, kwargs)
        self._record(hidden)
        out, seen = self._run(hidden, token_ids, self._second is not None)
        note_ours(self._module())
        return out if self._second is None else (out, seen[self._second].to(hidden.dtype))

    def _record(self, hidden: torch.Tensor) -> None:
        """Calls the router where transformers listens to it, for output_router_logits."""
        router = self._router
        if router is not None and (router._forward_hooks or "forward" in router.__dict__):
            router(hidden.reshape(-1, hidden.shape[-1]))

    def _refuse_if_released(self, reason: str) -> None:
        if reason and self.released_bytes:
            raise ConclaveRuntimeError(f"{self.path}: {reason}, and its weights were released")

    def _eager(self, args: Any, kwargs: Any) -> Any:
        # The shared expert beside the block was replaced by zeros; here it has to count.
        out = self._original(*args, **kwargs)
        if not self.siblings:
            return out
        hidden = args[0] if args else next(iter(kwargs.values()))
        for path in self.siblings:
            out = out + type(self._model().get_submodule(path)).forward(
                self._model().get_submodule(path), hidden
            )
        return out

    # Placing

    @property
    def expert_communicator(self) -> Communicator | None:
        """Over which rows reach experts that may move to other ranks; None where none may."""
        return None if self._split is None else self._split.expert_communicator

    @property
    def expert_group(self) -> Any:
        """The group of the same ranks."""
        return self._split.group if self._split is not None and self._split.moves_experts else None

    def sibling_modules(self) -> list[torch.nn.Module]:
        """What stands beside the block and was replaced with it."""
        return [self._model().get_submodule(path) for path in self.siblings]

    def install(self) -> None:
        """From now on the model calls this block."""
        for path in (self.path, *self.siblings):
            module = self._model().get_submodule(path)
            self._former[path] = module.__dict__.get("forward")
            module.forward = self.forward if path == self.path else _zero_of_input

    def remove(self) -> None:
        """The model calls what it called before."""
        for path, former in self._former.items():
            module = self._model().get_submodule(path)
            if former is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = former

    def release(self) -> int:
        """Frees the model's copy of what was packed, except what others hold too and what the
        framework goes on calling: a router that may be listened to, a norm behind the block.
        Modules with codes stay whole: load_state_dict brings these no new ones."""
        kept = modules_with_tied_weights(self._whole())
        kept |= {m for m in self._modules() if codes_of(m)}
        kept |= {
            m for part in (self._router, self._norm) if part is not None for m in part.modules()
        }
        freed = [free(m, list(m._parameters)) for m in self._modules() if m not in kept]
        self.released_bytes = sum(freed)
        self._watched = Watched(self._slots.tensors())
        return self.released_bytes

    def packed_bytes(self) -> int:
        return int(self.layer.plan["packed_bytes"])


_warned: set[str] = set()


def _says_something(argument: Any) -> bool:
    """Whether an argument beside the hidden states asks for more than the usual."""
    if isinstance(argument, torch.Tensor):
        return bool(argument.any())
    return argument is not None and argument is not False


def _forward_in_graph(block: PatchedBlock, args: Any, kwargs: Any) -> Any:
    given = dict(zip(block._parameters, args)) | kwargs  # noqa: B905
    hidden = next(iter(given.values()))
    reason = block._why_not(given)
    if reason and not block.released_bytes:
        note_traced(id(block._module()), reason)
        return block._eager(args, kwargs)
    # The operator raises for the reason: what is raised while a graph is made breaks the graph.
    if reason:
        hidden = hidden.detach()
    out, second = torch.ops.conclave.block(hidden, given.get("input_ids"), block.key, reason)
    return out if block._second is None else (out, second)


def _operator(
    hidden_states: torch.Tensor, input_ids: torch.Tensor | None, key: int, reason: str
) -> tuple[torch.Tensor, torch.Tensor]:
    block = _blocks[key]
    block._refuse_if_released(reason)
    replaced = block._wiring.why_other()
    if replaced:
        raise ConclaveRuntimeError(f"{block.path}: {replaced}")
    with torch.no_grad():
        out, seen = block._run(hidden_states, input_ids, wants=block._second is not None)
    note_ours(block._module())
    if block._second is None:
        return out, hidden_states.new_empty(0)
    return out, seen[block._second].to(hidden_states.dtype)


def _fake(
    hidden_states: torch.Tensor, input_ids: torch.Tensor | None, key: int, reason: str
) -> tuple[torch.Tensor, torch.Tensor]:
    block = _blocks[key]
    rows = hidden_states.numel() // hidden_states.shape[-1]
    shape = [0] if block._second is None else [rows, block.second_width]
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    return out, hidden_states.new_empty(shape)


def define_operator() -> None:
    """torch.ops.conclave.block with its shapes; once a process."""
    torch.library.custom_op(
        "conclave::block",
        _operator,
        mutates_args=(),
        schema="(Tensor hidden_states, Tensor? input_ids, int key, str reason) -> (Tensor, Tensor)",
    )
    torch.library.register_fake("conclave::block", _fake)
