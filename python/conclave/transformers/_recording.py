"""Routing of whole models: recorded while they run, and given back to them.

A block is reached in one of two ways. Where the library routes (`patch`), its layer is asked for
what it chose, or given what it shall choose. Elsewhere the call of the experts module says it, and
a router that is to choose otherwise is given other results of `torch.topk`: so its own weights, and
gradients through them, are those of the recorded experts.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from conclave import _conclave, _frameworks, _runtime
from conclave.errors import ConclaveRuntimeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.layer import Layer
from conclave.recording import Recorded, RoutingRecord, RoutingReplay
from conclave.transformers._block import PatchedBlock
from conclave.transformers._dispatch import dispatches, experts_of
from conclave.transformers._find import Candidate
from conclave.transformers._pair import PatchedPair
from conclave.transformers._patch import _patches
from conclave.transformers._split import SummedLayer

_Routed = tuple[torch.Tensor, torch.Tensor]  # ids and weights [T, k]


class _Tokens:
    """Which tokens the model's current call has: a row of its batch is a sequence."""

    def __init__(self, sequences: Sequence[int] | None) -> None:
        self._given = None if sequences is None else [int(s) for s in sequences]
        self._next = 0
        self._rows: list[int] = []
        self.keys = numpy.empty((0, 2), "int64")
        self._there: dict[torch.device, Any] = {}  # the same on GPUs, copied once a call

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        found = next((g for g in given if g is not None), args[0] if args else None)
        if not isinstance(found, torch.Tensor) or found.dim() < 2:
            raise ConclaveValueError("input_ids: expected [B, S], to know whose tokens these are")
        batch, length = int(found.shape[0]), int(found.shape[1])
        # Its name differs between versions of transformers.
        past = next((v for v in (*args, *kwargs.values()) if hasattr(v, "get_seq_length")), None)
        start = 0 if past is None else int(past.get_seq_length())
        if start == 0:
            self._rows = self._sequences(batch)
        if len(self._rows) != batch:
            raise ConclaveValueError(
                f"input_ids: expected the {len(self._rows)} rows of the sequences that were begun, "
                f"found {batch}"
            )
        positions = numpy.arange(start, start + length)
        self.keys = numpy.stack(
            [numpy.repeat(self._rows, length), numpy.tile(positions, batch)], axis=1
        ).astype("int64")
        self._there.clear()

    def _sequences(self, batch: int) -> list[int]:
        if self._given is None:
            self._next += batch
            return list(range(self._next - batch, self._next))
        if len(self._given) != batch:
            raise ConclaveValueError(
                f"sequences: expected {batch}, one for each row, found {len(self._given)}"
            )
        return self._given

    def of_rows(self, count: int) -> Any:
        if len(self.keys) != count:
            raise ConclaveUnsupportedError(
                f"the block was given {count} rows of {len(self.keys)} tokens: whose is not known"
            )
        return self.keys

    def beside(self, ids: torch.Tensor, stream: int) -> Any:
        """The keys of rows of a GPU, there."""
        keys = self.of_rows(int(ids.shape[0]))
        if ids.device not in self._there:
            self._there[ids.device] = _frameworks.copied_to(ids, keys, stream)
        return self._there[ids.device]


def _gathered(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights at ids, where a module has those of all experts."""
    return weights if weights.shape == ids.shape else weights.gather(1, ids)


class _RecordedBlock:
    """Takes what one block chooses."""

    def __init__(self, number: int, tokens: _Tokens, session: RecordedRouting) -> None:
        self.number, self.tokens, self.session = number, tokens, session
        self.num_experts = 0
        self.seen = False

    def _take(self, ids: torch.Tensor, weights: torch.Tensor, spec: Any = None) -> None:
        self.seen = True
        ids, weights = ids.detach(), weights.detach().float()
        if spec is None:  # ids of other ranks' experts are none
            ids = torch.where((ids < 0) | (ids >= self.num_experts), -1, ids)
        self.session._record(self, ids.contiguous(), weights.contiguous(), spec)

    def forward(
        self, layer: Layer | SummedLayer, rows: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """In place of layer.forward, where the layer routes."""
        spec = layer._core.spec()
        shape = (rows.shape[0], spec["top_k"])
        arguments = dict(arguments)
        for name, dtype in (("captured_ids", torch.int32), ("captured_weights", torch.float32)):
            arguments.setdefault(name, rows.new_empty(shape, dtype=dtype))
        out = layer.forward(rows, **arguments)
        self._take(arguments["captured_ids"], arguments["captured_weights"], spec)
        return out

    def given(self, ids: torch.Tensor, weights: torch.Tensor) -> _Routed:
        """The routing that is computed with, where a router outside of the layer has chosen."""
        self._take(ids, _gathered(ids, weights))
        return ids, weights

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield


class _ReplayedBlock:
    """Gives one block its choices."""

    def __init__(self, number: int, tokens: _Tokens, session: ReplayedRouting) -> None:
        self.number, self.tokens, self.session = number, tokens, session
        self.num_experts = 0
        self.seen = False
        self._chosen = 0

    def _recorded(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which rows of `own` were recorded, with their ids and weights."""
        keys = self.tokens.of_rows(own.shape[0])
        found, ids, weights = self.session._find(self.number, keys, own.shape[1])
        ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        mask = torch.from_numpy(found)[:, None].to(own.device)
        return mask, ids.to(own.device, own.dtype), weights.to(own.device)

    def forward(
        self, layer: Layer | SummedLayer, rows: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """In place of layer.forward, where the layer routes."""
        self.seen = True
        spec = layer._core.spec()
        keys = self.tokens.of_rows(rows.shape[0])
        found, _, _ = self.session._find(self.number, keys, spec["top_k"])
        shape = (rows.shape[0], spec["top_k"])
        arguments = dict(arguments)
        ids = rows.new_zeros(shape, dtype=torch.int32)
        weights = rows.new_zeros(shape, dtype=torch.float32)
        if not found.all() or "captured_logits" in arguments:
            own = {"captured_ids": ids, "captured_weights": weights}
            layer.forward(rows, **(arguments | own))
        mask, recorded_ids, recorded_weights = self._recorded(ids)
        arguments.pop("captured_logits", None)
        arguments.pop("token_ids", None)
        arguments["topk_ids"] = torch.where(mask, recorded_ids, ids)
        if not layer._core.router_weighs_shared:
            arguments["topk_weights"] = torch.where(mask, recorded_weights, weights)
        return layer.forward(rows, **arguments)

    def given(self, ids: torch.Tensor, weights: torch.Tensor) -> _Routed:
        """The routing that is computed with, where a router outside of the layer has chosen."""
        self.seen = True
        mask, recorded_ids, recorded = self._recorded(ids)
        # Limits of the recorded call, or other ranks, may have left slots empty: experts modules
        # know no such slots, and an expert that weighs 0 adds nothing.
        is_empty, recorded_ids = recorded_ids < 0, recorded_ids.clamp(min=0)
        differs = bool((mask & (recorded_ids != ids)).any())
        if differs and weights.requires_grad and torch.is_grad_enabled():
            raise ConclaveUnsupportedError(
                f"layer {self.number}: its router does not choose by one torch.topk of "
                f"{self.num_experts} experts, so that gradients of recorded choices are not known; "
                "use torch.no_grad()"
            )
        ids = torch.where(mask, recorded_ids, ids)
        own = _gathered(ids.clamp(min=0), weights)
        recorded = recorded.to(own.dtype).masked_fill(is_empty, 0)
        if own.requires_grad:  # its values, and gradients of the router's
            recorded = recorded + (own - own.detach()).masked_fill(is_empty, 0)
        return ids, torch.where(mask, recorded, own)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with _ChosenTopk(self):
            yield

    def choose(self, scores: torch.Tensor, chosen: Any) -> Any:
        """The result of a topk that chooses experts, with the recorded ones."""
        shape = chosen.indices.shape
        mask, ids, _ = self._recorded(chosen.indices.reshape(-1, shape[-1]))
        own = chosen.indices.reshape(-1, shape[-1])
        ids = torch.where(mask, ids.clamp(min=0), own).reshape(shape)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class _ChosenTopk(TorchFunctionMode):
    """While a block runs: topk over all of its experts gives the recorded ones."""

    def __init__(self, block: _ReplayedBlock) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores = args[0] if args else kwargs["input"]
        slots = self._block.session._slots.get(self._block.number, 0)
        is_choice = (
            scores.shape[-1] == self._block.num_experts
            and out.indices.shape[-1] == slots
            and out.indices.shape[:-1].numel() == len(self._block.tokens.keys)
        )
        return self._block.choose(scores, out) if is_choice else out


class RecordedRouting:
    """What `record_routing` has recorded so far; a source of `RoutingReplay` and comparisons."""

    def __init__(
        self, capacity: int, when_full: str, model: str, model_type: str, on_gpu: bool
    ) -> None:
        self._arguments = (capacity, when_full, model, model_type)
        self._on_gpu = on_gpu
        self._lock = threading.Lock()
        self._recorders: dict[int, _conclave.RoutingRecorder | _conclave.DeviceRoutingRecorder] = {}

    def _record(self, block: _RecordedBlock, ids: Any, weights: Any, spec: Any) -> None:
        with self._lock:
            recorder = self._recorders.get(block.number)
            if recorder is None:
                recorder = self._make(block, ids, spec)
                self._recorders[block.number] = recorder
        if isinstance(recorder, _conclave.DeviceRoutingRecorder):
            stream = _frameworks.stream_of(ids, None)
            keys = block.tokens.beside(ids, stream)
            recorder.record(block.number, ids, weights, keys, None, stream)
            return
        ids, weights = ids.cpu().contiguous(), weights.cpu().contiguous()
        recorder.record(block.number, ids, weights, block.tokens.of_rows(int(ids.shape[0])))

    def _make(
        self, block: _RecordedBlock, ids: torch.Tensor, spec: Any
    ) -> _conclave.RoutingRecorder | _conclave.DeviceRoutingRecorder:
        fields = (block.number, block.num_experts, int(ids.shape[1]), 0)
        if spec is not None:
            number, num_ids, _, spec_hash = _conclave.recorded_layer(block.number, spec)
            fields = (number, num_ids, int(ids.shape[1]), spec_hash)
        if self._on_gpu and ids.is_cuda:
            context = _runtime.context(_frameworks.device_of(ids))
            return _conclave.DeviceRoutingRecorder(context, [fields], *self._arguments)
        return _conclave.RoutingRecorder([fields], *self._arguments)

    def snapshot(self) -> RoutingRecord:
        """A copy of what is there."""
        with self._lock:  # another thread may come to a block for the first time
            recorders = list(self._recorders.values())
        records = [recorder.snapshot() for recorder in recorders]
        return RoutingRecord(_conclave.merge_records(records, *self._arguments[2:]))

    def write(self, path: Any) -> None:
        """`snapshot().write(path)`."""
        self.snapshot().write(path)

    def clear(self) -> None:
        """Forgets all rows."""
        with self._lock:
            recorders = list(self._recorders.values())
        for recorder in recorders:
            recorder.clear()


class ReplayedRouting:
    """What `replay_routing` gives to the blocks."""

    def __init__(self, recorded: Recorded, missing: str) -> None:
        if missing not in ("error", "route"):
            raise ConclaveValueError(f"missing: expected error or route, found {missing!r}")
        self._replay = RoutingReplay(recorded)
        self._slots = dict(self._replay._slots)
        self._routes_missing = missing == "route"

    def _find(self, number: int, keys: Any, slots: int) -> tuple[Any, Any, Any]:
        """Which tokens were recorded, and ids and weights of those."""
        if self._slots.get(number, slots) != slots:
            raise ConclaveValueError(
                f"layer {number}: expected {slots} experts for each token, found "
                f"{self._slots[number]} in the record"
            )
        found = numpy.ones(len(keys), bool)
        if self._routes_missing:
            found[:] = [self._replay._core.has(number, *key) for key in keys.tolist()]
        ids = numpy.zeros((len(keys), slots), "int32")
        weights = numpy.zeros((len(keys), slots), "float32")
        ids[found], weights[found] = self._replay.routing(number, keys[found])
        return found, ids, weights


def _numbered(candidates: list[Candidate]) -> list[tuple[int, Candidate]]:
    """Blocks with their layers' numbers, which are the last in their paths."""
    numbers = [re.findall(r"\.(\d+)(?:\.|$)", f".{c.path}") for c in candidates]
    found = [int(n[-1]) if n else -1 for n in numbers]
    if len(set(found)) != len(found) or min(found, default=0) < 0:
        found = list(range(len(candidates)))
    return list(zip(found, candidates, strict=True))


def _num_experts(candidate: Candidate) -> int:
    experts = candidate.experts
    if candidate.is_list:
        return len(list(experts.children()))
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        for owner in (experts, candidate.block):
            if isinstance(getattr(owner, name, None), int):
                return int(getattr(owner, name))
    return max(int(p.shape[0]) for p in experts.parameters(recurse=False))


def _replacement_of(model: Any, candidate: Candidate) -> PatchedBlock | None:
    for replacement in _patches.get(model, []):
        if isinstance(replacement, PatchedPair) and candidate.in_layer:
            raise ConclaveUnsupportedError(
                f"{candidate.path}: router and experts were replaced apart; unpatch the model first"
            )
        if isinstance(replacement, PatchedBlock) and replacement.path == candidate.path:
            return replacement
    return None


def _given_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Hidden states, ids and weights of a call of an experts module, and the rest."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    rest = dict(kwargs)
    given = [*args]
    for name in names[len(given) :]:
        if name in rest:
            given.append(rest.pop(name))
    return given, rest


class _Attachment:
    """Hooks on a model and its blocks, for as long as a session lasts."""

    def __init__(self, model: Any, make: Any, sequences: Sequence[int] | None) -> None:
        self._tokens = _Tokens(sequences)
        self._handles: list[Any] = []
        self._replaced: list[PatchedBlock] = []
        self._blocks: list[Any] = []
        self._open: dict[int, contextlib.ExitStack] = {}
        candidates = experts_of(model)
        if not candidates:
            raise ConclaveUnsupportedError(f"{type(model).__name__}: it has no MoE blocks")
        try:
            for number, candidate in _numbered(candidates):
                self._attach(model, candidate, make(number, self._tokens))
            begin = model.register_forward_pre_hook(self._begin, with_kwargs=True)
            self._handles += [begin, model.register_forward_hook(self._end)]
        except BaseException:
            self.detach()
            raise

    def _attach(self, model: Any, candidate: Candidate, block: Any) -> None:
        block.num_experts = _num_experts(candidate)
        replacement = _replacement_of(model, candidate)
        if replacement is not None:
            if replacement.routing is not None:
                raise ConclaveValueError("model: its routing is recorded or replayed already")
            replacement.routing = block
            self._replaced.append(replacement)
        elif not dispatches(candidate.experts):
            raise ConclaveUnsupportedError(
                f"{candidate.path}: {type(candidate.experts).__name__} is not called with ids and "
                "weights; conclave.transformers.patch replaces its block"
            )
        if not candidate.is_list:
            self._hook(candidate, block)
        self._blocks.append((block, candidate.path))

    def _hook(self, candidate: Candidate, block: Any) -> None:
        def on_experts(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given, rest = _given_of(args, kwargs)
            if len(given) != 3:
                return None
            ids, weights = block.given(given[1], given[2])
            return (given[0], ids, weights), rest

        def enter(module: Any, _: Any) -> None:
            stack = contextlib.ExitStack()
            stack.enter_context(block.around())
            self._open[id(module)] = stack

        def leave(module: Any, _: Any, __: Any) -> None:
            stack = self._open.pop(id(module), None)
            if stack is not None:
                stack.close()

        self._handles += [
            candidate.experts.register_forward_pre_hook(on_experts, with_kwargs=True),
            candidate.block.register_forward_pre_hook(enter),
            candidate.block.register_forward_hook(leave, always_call=True),
        ]

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tokens.begin(args, kwargs)
        for block, _path in self._blocks:
            block.seen = False

    def _end(self, *_: Any) -> None:
        unseen = [path for block, path in self._blocks if not block.seen]
        if unseen:
            raise ConclaveRuntimeError(f"{unseen[0]}: the block ran without showing its routing")

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for replacement in self._replaced:
            replacement.routing = None


@contextlib.contextmanager
def record_routing(
    model: Any,
    *,
    capacity: int = 65536,
    when_full: str = "drop_oldest",
    sequences: Sequence[int] | None = None,
    on_gpu: bool = False,
) -> Iterator[RecordedRouting]:
    """While it is open, ids and weights of every token in every MoE block are recorded.

    A row of the model's batch is a sequence, its columns are positions, also those of padding;
    `generate` goes on where the cache ends. Ids and weights are copied to the host in every block,
    which on a GPU waits for it, unless they stay there.

    Args:
        model: a model of transformers, patched or not, with any experts implementation.
        capacity: tokens of each layer. when_full: as in `conclave.RoutingRecorder`.
        sequences: numbers of the rows; by default they are numbered on with every new batch.
        on_gpu: rows of blocks on a GPU are kept in rings there, which takes `capacity` times
            8 k + 16 bytes of its memory for each layer; nothing waits before they are read.

    Raises:
        ConclaveUnsupportedError: a block does not show what it chooses, with the reason.
    """
    config = getattr(model, "config", None)
    session = RecordedRouting(
        capacity,
        when_full,
        str(getattr(config, "_name_or_path", "") or ""),
        str(getattr(config, "model_type", "") or ""),
        bool(on_gpu),
    )
    attached = _Attachment(
        model, lambda number, tokens: _RecordedBlock(number, tokens, session), sequences
    )
    try:
        yield session
    finally:
        attached.detach()


@contextlib.contextmanager
def replay_routing(
    model: Any,
    recorded: Recorded,
    *,
    sequences: Sequence[int] | None = None,
    missing: str = "error",
) -> Iterator[None]:
    """While it is open, every MoE block uses the recorded experts with the recorded weights.

    Where gradients are required, weights have the recorded values, and the gradients of the
    router's own weights of these experts: those reach the router as without a replay.

    Args:
        model: as in `record_routing`.
        recorded: a record, a file, or a recorder.
        sequences: numbers of the batch's rows in the record; by default they are numbered on from
            0 with every new batch.
        missing: what is done for a token that was not recorded: "error", or "route", its own
            choice. `generate` records no routing of the last token that it makes.

    Raises:
        ConclaveValueError: a layer or token was not recorded, or has another k.
        ConclaveUnsupportedError: a block cannot be given its routing, with the reason.
    """
    session = ReplayedRouting(recorded, missing)
    attached = _Attachment(
        model, lambda number, tokens: _ReplayedBlock(number, tokens, session), sequences
    )
    try:
        yield
    finally:
        attached.detach()
