"""One MoE layer as a Python object."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conclave import _conclave, _frameworks, _gradients, _limits, _runtime
from conclave._process_groups import communicator_of
from conclave._shapes import as_loaded, complete_spec, device_of_experts
from conclave._weights import given_weights
from conclave.balance import ExpertSlots
from conclave.checkpoint import Checkpoint, Feed
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.ranks import Communicator
from conclave.refit import Refit, begin_refit, withdraw_refit
from conclave.spec import LayerOptions, MoeSpec, ParallelSpec, from_dict, to_dict

Array = Any  # numpy, torch, or anything with __dlpack__
Ranks = Any  # a Communicator, or a group of torch.distributed

_MOST_ADAPTERS = 2**31 - 1
_MOST_LAYERS = 2**31 - 1
_MOST_BYTES = 2**63 - 1

# The arguments of a call in the order of the module's table, which has their shapes and types. A
# caller's scratch memory is no argument of `Layer.forward`.
_ARGUMENTS = tuple(row["name"] for row in _conclave.call_arguments() if not row["is_scratch"])


@dataclasses.dataclass(frozen=True)
class LayerStats:
    """Counters of a layer since it was made, or since `Layer.reset_stats`.

    The first four are of the layer's whole life. On a GPU they and `expert_load` do not wait for
    work that streams still hold.
    """

    forwards: int
    tokens: int
    skipped_ids: int
    tokens_without_finite_logit: int
    expert_load: tuple[int, ...] | None  # rows of each expert [E]; None if they are not counted
    timings_ns: dict[str, int] | None  # route, dispatch, experts, shared, combine, total; CPU only
    refit_epoch: int = 0  # the number of the last refit that was committed

    @property
    def balance(self) -> float | None:
        """The largest load over the mean: 1 is even, E is one expert alone. None without load."""
        if not self.expert_load or not any(self.expert_load):
            return None
        return max(self.expert_load) * len(self.expert_load) / sum(self.expert_load)


def _split(
    parallel: ParallelSpec | Mapping[str, Any] | None,
    communicator: Communicator | None,
    tensor_communicator: Communicator | None,
) -> dict[str, Any]:
    """What the caller says, by default the whole of both groups."""
    if parallel is not None:
        return to_dict(parallel)
    split: dict[str, Any] = {}
    if communicator is not None:
        split.update(ep_size=communicator.size, ep_rank=communicator.rank)
    if tensor_communicator is not None:
        split.update(tp_size=tensor_communicator.size, tp_rank=tensor_communicator.rank)
    return split


def _ranks(
    communicator: Ranks | None, tensor_communicator: Ranks | None, device: str | None
) -> tuple[Communicator | None, Communicator | None]:
    """Both groups as communicators that carry the layer's memory: all ranks connect the expert
    group first."""
    place = _runtime.device_name(device)
    experts = communicator_of(communicator, "communicator", place)
    slices = communicator_of(tensor_communicator, "tensor_communicator", place)
    if experts is not None and experts is slices and experts.size > 1:
        raise ConclaveValueError(
            "tensor_communicator: expected other ranks than those of communicator, found the same "
            "group"
        )
    return experts, slices


def required_ranks(ranks: Ranks, argument: str) -> Communicator:
    """A communicator, of a group too."""
    found = communicator_of(ranks, argument)
    if found is None:
        raise ConclaveTypeError(f"{argument}: expected a Communicator or a group, found None")
    return found


def copying(processor_share: float, piece_bytes: int) -> tuple[float, int]:
    """How ranks copy to each other, as checked numbers."""
    return (
        _limits.real("processor_share", processor_share),
        _limits.integer("piece_bytes", piece_bytes, 0, _MOST_BYTES),
    )


class Layer:
    """A MoE layer, planned and packed once, run for any number of tokens.

    Make one with `from_checkpoint` or `from_tensors`. Forwards may run from several threads at
    once; the GIL is released meanwhile.
    """

    def __init__(self, core: _conclave.Layer) -> None:
        self._core = core
        self._on_cpu = core.device == "cpu"

    def _num_columns(self) -> int:
        spec = self._core.spec()
        return int(spec["num_experts"] + spec["num_zero_experts"])

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | Feed | str | os.PathLike[str],
        layer: int,
        *,
        device: str | None = None,
        isa: str | None = None,
        options: LayerOptions | Mapping[str, Any] | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        count: bool | None = None,
        plain_rows: bool = False,
        communicator: Ranks | None = None,
        tensor_communicator: Ranks | None = None,
    ) -> Layer:
        """A layer of a model directory.

        Args:
            checkpoint: the directory, one that is open already, or a `Feed` that has the layer.
            layer: N of model.layers.N.
            device: "cpu" or "cuda:0"; by default CONCLAVE_DEVICE, else "cpu".
            isa: an instruction set to force, such as "avx2".
            options, parallel: how it runs, and which part of it.
            count: whether `stats` counts rows by expert; by default on the CPU only, where it
                costs nothing.
            plain_rows: leave rows as they are where the checkpoint quantises them.
            communicator, tensor_communicator: the ranks that hold the other experts, and the other
                slices of these; all of them make the layer at the same time, and call it. With
                one of them `parallel` is by default a split over its ranks. Each is a Communicator,
                or a group of torch.distributed: all layers of a device that are given that group
                share one communicator, which `from_process_group` makes; on a GPU one of NCCL.

        Raises:
            Error: naming the file, tensor or field; KeyboardInterrupt stops a load.
        """
        experts, slices = _ranks(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        arguments = (
            layer,
            to_dict(options or {}),
            _split(parallel, experts, slices),
            context.device == "cpu" if count is None else count,
            plain_rows,
        )
        if isinstance(checkpoint, Feed):
            return cls(_conclave.Layer.from_feed(context, checkpoint._core, *arguments))
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        return cls(_conclave.Layer.from_checkpoint(context, checkpoint._core, *arguments))

    @classmethod
    def from_tensors(
        cls,
        spec: MoeSpec | Mapping[str, Any],
        *,
        device: str | None = None,
        isa: str | None = None,
        options: LayerOptions | Mapping[str, Any] | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        expert_map: Sequence[int] | None = None,
        count: bool | None = None,
        communicator: Ranks | None = None,
        tensor_communicator: Ranks | None = None,
        **weights: Array | Sequence[Array] | None,
    ) -> Layer:
        """A layer of arrays. On the CPU they are packed and may go; on a GPU they are used in place
        and kept where they are dense and concatenated.

        Args:
            spec: what the layer computes. Sizes, the weights' type and has_gate may be left out.
            gate_up_order: of the rows of gate_up and its bias: "concatenated" (all gate rows, then
                all up rows) or "interleaved" (gate 0, up 0, gate 1, ...).
            transposed: gate_up and down are [E, H, 2I] and [E, I, H].
            expert_map: [num_experts], the index in the arrays of each expert, -1 for none; for
                layers that hold a part of the experts (`parallel`). Static scales of rows may be
                those of all experts, of which the largest counts.
            communicator, tensor_communicator: as in `from_checkpoint`.
            weights: by name, those that the spec needs: ``gate_up`` [E, 2I, H] ([E, I, H] without a
                gate) or ``gate`` and ``up`` [E, I, H] apart; ``down`` [E, H, I]; ``router`` [E, H];
                ``gate_up_bias`` [E, 2I], ``down_bias`` [E, H]; ``selection_bias`` [E];
                ``shared_gate_up``, ``shared_down``, ``shared_expert_gate``; ``gate_up_scale``,
                ``down_scale``, and with the same beginnings ``_zero`` (as scales),
                ``_global_scale`` [E] or of gate and up [E, 2], ``_column_order`` and
                ``_column_factor`` [E, H] or [E, 2, H], of down [E, I]; and the
                others of ExpertWeights in the C++ interface.
                Instead of a stack, gate_up, gate, up and down may be lists of one matrix an expert.
                int8 weights are int8 arrays, or uint8 ones, each byte 128 more than its value;
                int4 ones are uint8 [E, rows, cols / 2] or int32 [E, rows, cols / 8], the first code
                in the lowest bits, each eight more than its value. The spec's ``weight_dtype`` must
                name both where arrays are no int8. Gradients of forwards do not reach weights:
                while torch records, none may require them.

        Raises:
            Error: naming the argument, with what was expected and found.
        """
        given = given_weights(weights)
        fields = complete_spec(to_dict(spec), given, transposed, expert_map)
        orders = (gate_up_order, shared_gate_up_order)
        given, orders = as_loaded(given, orders, transposed, fields)
        device = device or device_of_experts(given)
        experts, slices = _ranks(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        return cls(
            _conclave.Layer.from_arrays(
                context,
                fields,
                given,
                to_dict(options or {}),
                _split(parallel, experts, slices),
                *orders,
                transposed,
                list(expert_map) if expert_map is not None else [],
                context.device == "cpu" if count is None else count,
            )
        )

    def forward(
        self,
        hidden: Array,
        *,
        router_logits: Array | None = None,
        topk_ids: Array | None = None,
        topk_weights: Array | None = None,
        router_input: Array | None = None,
        residual_input: Array | None = None,
        token_ids: Array | None = None,
        padding_mask: Array | None = None,
        adapter_ids: int | Array | None = None,
        num_tokens: int | Array | None = None,
        top_k: int | None = None,
        banned_experts: Array | Sequence[int] | None = None,
        expert_budget: int | None = None,
        rank_tokens: Sequence[int] | Array | None = None,
        out: Array | None = None,
        shared_out: Array | None = None,
        captured_logits: Array | None = None,
        captured_ids: Array | None = None,
        captured_weights: Array | None = None,
        stream: Any = None,
        workspace: Array | None = None,
    ) -> Array:
        """Runs the layer on T tokens. Give one source of routing: logits, or ids with weights, or
        nothing where the layer has a gate. Ids without weights, with logits or a gate, replay
        recorded choices: the router then only weighs them.

        Args:
            hidden: [T, H] float32, float16 or bfloat16, on the layer's device; rows may be apart.
            router_logits: [T, E] of the same kinds of type.
            topk_ids: [T, k] int32 or int64, -1 for none. topk_weights: [T, k].
            router_input, residual_input: [T, H], read instead of hidden.
            token_ids: [T] integers, of router "hash".
            padding_mask: [T] bool; False: the token is padding, its output is 0.
            adapter_ids: [T] integers that `load_adapter` returned, -1 for none; or one for all. On
                a GPU unknown ids of an array are counted in `LayerStats.skipped_ids`.
            num_tokens: only that many rows count; on a GPU an int64 tensor of one element.
            top_k, banned_experts, expert_budget: limits of this call's choices. Fewer experts for
                each token; ids that nobody shall choose, or bools [E] or [T, E] (E and zero
                experts), which on a GPU may lie there, and [T, E] must; at most so many experts
                for all tokens together. docs/routing.md has the rules.
            rank_tokens: the rows of hidden of every expert-parallel rank in this call, [ep_size]
                integers in a list or an array of the CPU, the same ones on all ranks or None on
                all. On a GPU ranks then need not ask each other; on the CPU they are compared.
            out: [T, H] to write to, maybe hidden itself. By default new memory of the library that
                made hidden, with its type.
            shared_out: [T, H] that gets the shared experts' part, which out then lacks.
            captured_logits [T, E] float32, captured_ids [T, k] int32, captured_weights [T, k]
                float32: to be filled with what was routed.
            stream: of CUDA, where the work is enqueued; by default torch's current one.
            workspace: uint8 [N], at least `workspace_bytes(T)`, on the layer's device and 64-byte
                aligned: scratch memory that no other call uses meanwhile. By default the layer's.

        Returns:
            out.

        Raises:
            Error: naming the argument, with what was expected and found; also where torch records
                gradients and an argument requires them. ConclaveCommError where ranks were given
                other rank_tokens, on a GPU at a later call.
        """
        if out is None:
            out = _frameworks.empty_like(
                hidden, _frameworks.shape_of(hidden, "hidden"), None, "out"
            )
        if isinstance(adapter_ids, int) or getattr(adapter_ids, "shape", None) == ():
            adapter_ids = self._one_for_all(adapter_ids)
        arguments = (
            hidden,
            out,
            router_logits,
            topk_ids,
            topk_weights,
            router_input,
            residual_input,
            token_ids,
            padding_mask,
            adapter_ids,
            num_tokens,
            _limits.plain(top_k),
            _limits.flags_of(banned_experts, self._num_columns),
            _limits.plain(expert_budget),
            rank_tokens,
            shared_out,
            captured_logits,
            captured_ids,
            captured_weights,
        )
        _gradients.refuse_among(_ARGUMENTS, arguments)
        if self._on_cpu:
            _runtime.follow_threads()
            if workspace is None:
                self._core.forward(*arguments)
            else:
                self._core.forward(*arguments, workspace, 0)
            return out
        handle = _frameworks.stream_of(hidden, stream)
        shape = _frameworks.shape_of(hidden, "hidden")
        if workspace is None:
            num_bytes = self._core.workspace_bytes(shape[0] if shape else 0)
            workspace = _frameworks.scratch(hidden, num_bytes, handle)
        self._core.forward(*arguments, workspace, handle)
        return out

    __call__ = forward

    def workspace_bytes(self, tokens: int) -> int:
        """Bytes of scratch memory that a call of so many tokens needs."""
        return int(self._core.workspace_bytes(_limits.integer("tokens", tokens, 0, _MOST_BYTES)))

    @staticmethod
    def _one_for_all(adapter_id: Any) -> int | None:
        number = _limits.integer("adapter_ids", adapter_id, -1, _MOST_ADAPTERS)
        return None if number == -1 else number

    def load_adapter(
        self,
        directory: str | os.PathLike[str] | None = None,
        layer: int | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        gate_up_order: str | None = None,
        scale: float = 1.0,
        name: str = "",
        **factors: Array,
    ) -> int:
        """Adds low-rank adapters of the experts, and returns the id that calls name them by.

        The layer needs `LayerOptions.max_adapter_rank`. Forwards that are under way do not see
        it. Arrays are in host memory, wherever the layer is. With several ranks all add and remove
        the same adapters in the same order, between the same forwards; each keeps those of its
        experts.

        Args:
            directory: what PEFT saved. layer: N of model.layers.N there.
            checkpoint: the model's, which says how gate and up lie in its stacks, and whether it
                has the adapter's layers.
            gate_up_order: instead of it: "concatenated" (by default) or "interleaved" (gpt-oss).
            scale, name: of an adapter of arrays.
            factors: such arrays: ``gate_a`` [E, r, H] and ``gate_b`` [E, I, r], ``up_a``,
                ``up_b``, ``down_a`` [E, r, I] and ``down_b`` [E, H, r]; of shared experts
                ``shared_gate_a`` [S, r, H] and so on. What is missing is not adapted.

        Raises:
            Error: naming the file, tensor or array, with what was expected and found.
        """
        if directory is None:
            return self._core.add_adapter_from_arrays(
                factors, _limits.real("scale", scale), _limits.text("name", name)
            )
        if factors:
            raise ConclaveTypeError(
                f"{next(iter(factors))}: expected no arrays beside a directory, found some"
            )
        if layer is None:
            raise ConclaveTypeError("layer: expected a layer's number, found None")
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise ConclaveTypeError(
                f"checkpoint: expected a Checkpoint, found {type(checkpoint).__name__}"
            )
        return self._core.add_adapter_from_directory(
            _limits.path("directory", directory),
            _limits.integer("layer", layer, 0, _MOST_LAYERS),
            None if gate_up_order is None else _limits.text("gate_up_order", gate_up_order),
            checkpoint._core if checkpoint is not None else None,
        )

    def remove_adapter(self, adapter_id: int) -> None:
        """Removes an adapter. Forwards that are under way keep it, and CUDA graphs that hold a
        forward until `forget_graphs`."""
        self._core.remove_adapter(_limits.integer("adapter_id", adapter_id, -1, _MOST_ADAPTERS))

    def forget_graphs(self) -> int:
        """Says that no CUDA graph which holds a forward of this layer is launched any more: gives
        back the memory of adapters that were removed since, and returns its bytes. Waits for the
        device."""
        return self._core.forget_graphs()

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """For each adapter its id, name, max_rank, num_factors, and the bytes this rank holds."""
        return self._core.adapters()

    def reload(
        self,
        checkpoint: Checkpoint | Feed | str | os.PathLike[str] | None = None,
        layer: int | None = None,
        *,
        mode: str = "staged",
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        expert_map: Sequence[int] | None = None,
        **weights: Array | Sequence[Array] | None,
    ) -> None:
        """New weights of the same shapes and types, from a checkpoint or from arrays.

        Waits for forwards of other threads; on a GPU synchronise first. `mode` "staged" packs a
        second copy and swaps; "in_place" overwrites, and a read that fails midway leaves a layer
        that refuses to run until a reload completes. Other arguments as in `from_tensors`.
        """
        if checkpoint is not None:
            if layer is None:
                raise ConclaveTypeError("layer: expected a layer's number, found None")
            if isinstance(checkpoint, Feed):
                self._core.reload_from_feed(checkpoint._core, layer, mode)
                return
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint(checkpoint)
            self._core.reload_from_checkpoint(checkpoint._core, layer, mode)
            return
        orders = (gate_up_order, shared_gate_up_order)
        given, orders = as_loaded(given_weights(weights), orders, transposed, self._core.spec())
        self._core.reload_from_arrays(
            given,
            mode,
            *orders,
            transposed,
            list(expert_map) if expert_map is not None else [],
        )

    def refit(
        self,
        *,
        mode: str = "staged",
        experts: Sequence[int] | None = None,
        tensors: Sequence[str] | None = None,
        epoch: int | None = None,
        threads: int = 1,
        keeps_memory: bool = False,
        refusal: str = "withdraw",
    ) -> Refit:
        """Begins a transaction that gives the layer new weights, or a part of them, while it
        serves: a forward sees the old or the new ones, never a mixture.

            with layer.refit(experts=[3, 5]) as refit:
                refit.stage(gate_up=gate_up, down=down)

        Args:
            mode: "staged" packs beside the old weights, and the commit hands the memory over;
                "staged_copy" packs beside them too, and the commit copies into the memory that the
                layer has, which keeps its addresses; "in_place" overwrites, for which forwards are
                refused until the commit. On a GPU "staged" is "staged_copy": addresses stay, and
                graphs that were captured have the new weights.
            experts: routed experts that change; by default all. Alone: everything of these.
            tensors: what changes, by the names of `from_tensors`; by default all. Gate and up of an
                expert change together with all of their planes, and down with its own.
            epoch: the number that `stats` shows after the commit, such as a trainer's step; by
                default one more.
            threads: that pack, beside those of forwards; on a GPU by default those of the process.
            keeps_memory: keep the memory of a staged refit for the next one of all experts, which
                is faster and holds the weights twice for as long.
            refusal: where ranks share the layer and this one is refused here: "withdraw" calls
                `withdraw_refit` before it raises, and so waits for the commit of the others;
                "silent" leaves that call to the caller, whose other threads run forwards now.

        Raises:
            ConclaveValueError: an expert or tensor that the layer does not have, or an epoch that
                is not larger.
            ConclaveRuntimeError: another refit or a migration is under way.
            ConclaveUnsupportedError: experts that are read where their source has them, in part
                or on a GPU.
        """
        return begin_refit(self, mode, experts, tensors, epoch, threads, keeps_memory, refusal)

    def withdraw_refit(self) -> None:
        """In the place of `Refit.commit`, for a rank that has no refit where the others have one:
        it was refused, or did not find its weights. The others' commit raises ConclaveCommError
        with this rank as its `peer`; waits for them, no longer than the communicator's deadline."""
        withdraw_refit(self)

    @contextlib.contextmanager
    def replaying(self, stream: Any = 0) -> Iterator[None]:
        """Around the launch of a CUDA graph that holds forwards of this layer: to a refit of
        another thread the replay is then what a forward is, with the old or the new weights.

            with layer.replaying(torch.cuda.current_stream()):
                graph.replay()

        Args:
            stream: of CUDA, where the graph is launched: a number, or an object of torch or cupy.

        Raises:
            ConclaveRuntimeError: weights are being overwritten in place.
        """
        handle = 0 if self._on_cpu else _frameworks.stream_of(None, stream)
        replay = _conclave.Replay(self._core, handle)
        try:
            yield
        finally:
            replay.end()

    def content_hash(self) -> int:
        """XXH3-64 of the weights that this rank holds: equal for layers of one plan with equal
        weights, whatever way these came. Reads all of them."""
        return _conclave.content_hash(self._core)

    def update_placement(
        self,
        slots: ExpertSlots | ParallelSpec,
        *,
        source: tuple[Checkpoint | Feed, int] | None = None,
        communicator: Communicator | None = None,
        piece_bytes: int = 256 << 10,
    ) -> None:
        """Moves experts between ranks, and returns when forwards use their new places.

        On every rank with the same arguments, between the same two forwards; waits for forwards of
        other threads. No bit of a result changes. `conclave.Migration` moves them beside forwards.

        Args:
            slots: what each rank shall hold, such as `balance_experts` gives, or a split that says
                so. Replicas may become those of other experts.
            source: a checkpoint or feed and the number of its layer, from which ranks read the
                experts that come, instead of having them sent.
            communicator: by default the layer's.
            piece_bytes: of a message.

        Raises:
            ConclaveValueError, ConclaveUnsupportedError: where the layer cannot have the slots.
            ConclaveCommError: where ranks disagree, one is lost or late, or a copy differs; the
                layer stays at the last placement that all ranks had.
        """
        self._core.update_placement(
            *slots_of(self, slots),
            communicator_of(communicator, "communicator"),
            *source_of(source),
            _limits.integer("piece_bytes", piece_bytes, 0, _MOST_BYTES),
        )

    @property
    def slots(self) -> ExpertSlots:
        """What each rank holds now."""
        num_experts, logical_of, first_of = self._core.slots()
        return ExpertSlots(num_experts, tuple(logical_of), tuple(first_of))

    @property
    def placement_epoch(self) -> int:
        """How often experts have moved: equal on all ranks."""
        return self._core.placement_epoch

    def on_ranks(
        self,
        communicator: Ranks | None = None,
        *,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        old_ranks: Sequence[int] | None = None,
        tensor_communicator: Ranks | None = None,
        checkpoint: Checkpoint | Feed | str | os.PathLike[str] | None = None,
        layer: int | None = None,
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        expert_map: Sequence[int] | None = None,
        **weights: Array | Sequence[Array] | None,
    ) -> Layer:
        """The same layer on other ranks: those that are left after a failure, or more.

        What this rank holds is copied; experts that it lacks are read from the checkpoint or the
        arrays, which all ranks give or none. All ranks of the communicator call at the same time; a
        rank that joins makes the layer with the same split. This layer stays as it is. Counters
        begin anew.

        Args:
            communicator, tensor_communicator: the new ranks; none for a layer of one rank.
            parallel: how they split it; by default evenly, or by old_ranks.
            old_ranks: those of `Survivors`: experts stay where they are, and lost ones go to the
                ranks with the fewest.
            checkpoint, layer, gate_up_order, ..., weights: as in `reload`; none where every expert
                is on a rank that is left.

        Raises:
            Error: naming an expert that a rank lacks and cannot read.
        """
        if old_ranks is not None and parallel is not None:
            raise ConclaveTypeError("old_ranks: expected None beside parallel")
        experts, slices = _ranks(communicator, tensor_communicator, self._core.device)
        context = _runtime.context(self._core.device, self._core.isa, experts, slices)
        split = _split(parallel, experts, slices)
        if old_ranks is not None:
            rank = 0 if experts is None else experts.rank
            old_ranks = _limits.integers("old_ranks", old_ranks, -_MOST_LAYERS, _MOST_LAYERS)
            before = self._core.parallel()
            if self.placement_epoch > 0:
                before = _conclave.with_slots(before, *self._core.slots())
            split = _conclave.without_ranks(self.spec.num_experts, before, old_ranks, rank)
        given = given_weights(weights)
        if checkpoint is None and not given:
            return type(self)(self._core.on_ranks(context, split))
        if checkpoint is not None:
            if layer is None:
                raise ConclaveTypeError("layer: expected a layer's number, found None")
            if isinstance(checkpoint, Feed):
                return type(self)(
                    self._core.on_ranks_from_feed(context, split, checkpoint._core, layer)
                )
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint(checkpoint)
            return type(self)(
                self._core.on_ranks_from_checkpoint(context, split, checkpoint._core, layer)
            )
        orders = (gate_up_order, shared_gate_up_order)
        given, orders = as_loaded(given, orders, transposed, self._core.spec())
        local_of = list(expert_map) if expert_map is not None else []
        return type(self)(
            self._core.on_ranks_from_arrays(context, split, given, *orders, transposed, local_of)
        )

    def regroup(
        self,
        everyone: Ranks,
        communicator: Ranks | None = None,
        *,
        tensor_communicator: Ranks | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        source: tuple[Checkpoint | Feed, int] | None = None,
        processor_share: float = 1,
        piece_bytes: int = 256 << 10,
    ) -> Layer:
        """The same layer on other ranks, more or fewer, as a planned act: ranks that leave hand
        their experts over, ranks that join get theirs from those that have them.

        Every rank of `everyone` calls at the same time: `regroup` where it stays, `hand_over` where
        it leaves, `Layer.join` where it joins. All of them come through, or all raise and nothing
        has changed. This layer stays as it is, and its forwards on other threads go on meanwhile.
        Counters begin anew, adapters stay with this layer.

        Args:
            everyone: joins all ranks concerned, in any order, and serves nothing else meanwhile;
                those of one slice where experts are sliced.
            communicator, tensor_communicator: the ranks afterwards; none for a layer of one rank.
            parallel: how they split it; by default evenly, with as few moves as possible
                (`spread_over`). All give one or none does.
            source: a checkpoint or feed and the number of its layer, for experts that none of the
                ranks has.
            processor_share: the part of a core that copying may take; from 1 on it never rests.
            piece_bytes: of a message.

        Raises:
            ConclaveCommError: naming a rank that is lost, late, or could not do its part, or what
                ranks disagree on.
            Error: what this rank cannot do; naming an expert that nobody has.
        """
        experts, slices = _ranks(communicator, tensor_communicator, self._core.device)
        context = _runtime.context(self._core.device, self._core.isa, experts, slices)
        return type(self)(
            self._core.regroup(
                context,
                required_ranks(everyone, "everyone"),
                None if parallel is None else to_dict(parallel),
                *source_of(source),
                *copying(processor_share, piece_bytes),
            )
        )

    def hand_over(
        self, everyone: Ranks, *, processor_share: float = 1, piece_bytes: int = 256 << 10
    ) -> None:
        """Gives this rank's experts to those that stay, as `regroup` says. Afterwards the layer may
        go."""
        self._core.hand_over(
            required_ranks(everyone, "everyone"), *copying(processor_share, piece_bytes)
        )

    @classmethod
    def join(
        cls,
        spec: MoeSpec | Mapping[str, Any],
        everyone: Ranks,
        communicator: Ranks | None = None,
        *,
        device: str | None = None,
        isa: str | None = None,
        options: LayerOptions | Mapping[str, Any] | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        source: tuple[Checkpoint | Feed, int] | None = None,
        count: bool | None = None,
        tensor_communicator: Ranks | None = None,
        processor_share: float = 1,
        piece_bytes: int = 256 << 10,
    ) -> Layer:
        """A layer that other ranks have, on this one as well: experts and all else come from them,
        as `regroup` says.

        Args:
            spec, options: those of the layer, `Layer.spec` and what it was made with.
            everyone, communicator, parallel, source, ...: as in `regroup`.
            device, isa, count: as in `from_checkpoint`.

        Raises:
            ConclaveCommError: naming what ranks disagree on, as `regroup` does.
        """
        experts, slices = _ranks(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        return cls(
            _conclave.Layer.join(
                context,
                to_dict(spec),
                to_dict(options or {}),
                context.device == "cpu" if count is None else count,
                required_ranks(everyone, "everyone"),
                None if parallel is None else to_dict(parallel),
                *source_of(source),
                *copying(processor_share, piece_bytes),
            )
        )

    def plan_for(self, max_tokens: int) -> None:
        """Plans for calls of up to `max_tokens` tokens, on the weights packed already.

        Longer calls run in equal chunks. A layer never plans for fewer tokens than it did; the
        results of a CPU do not depend on it. Scratch memory is that of a call's own tokens on a
        GPU, and of the plan's on a CPU. Safe beside forwards of other threads, and up to 16384
        tokens while a CUDA graph is captured; graphs captured before stay right.

        Raises:
            ConclaveValueError: max_tokens is out of range.
        """
        self._core.plan_for(_limits.integer("max_tokens", max_tokens, -_MOST_BYTES, _MOST_BYTES))

    @property
    def spec(self) -> MoeSpec:
        """What the layer computes."""
        return from_dict(MoeSpec, self._core.spec())

    @property
    def parallel(self) -> ParallelSpec:
        """Which part of it this layer holds."""
        return from_dict(ParallelSpec, self._core.parallel())

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:0"."""
        return self._core.device

    @property
    def plan(self) -> dict[str, Any]:
        """Every decision made for the layer, as `explain` prints them."""
        return self._core.plan()

    def explain(self) -> str:
        """The plan as text: kernels, those not taken and why, sizes."""
        return self._core.explain()

    def stats(self) -> LayerStats:
        """Expert load, balance, timings and counters."""
        values = self._core.stats()
        timings = values.pop("timings")
        load = values.pop("expert_load")
        return LayerStats(
            expert_load=tuple(load) if load is not None else None, timings_ns=timings, **values
        )

    def reset_stats(self) -> None:
        """Sets expert load and timings to zero. Not while a forward runs."""
        self._core.reset_stats()

    def __repr__(self) -> str:
        spec = self._core.spec()
        return (
            f"<conclave.Layer {spec['num_experts']} experts, top {spec['top_k']}, "
            f"{spec['hidden_size']} x {spec['intermediate_size']}, {spec['weight_dtype']}, "
            f"{self._core.device}>"
        )


def slots_of(layer: Layer, slots: ExpertSlots | ParallelSpec) -> tuple[int, list[int], list[int]]:
    """The fields of slots, or of a split of the layer's ranks."""
    if isinstance(slots, ExpertSlots):
        return slots._parts()
    num_experts, logical_of, first_of = _conclave.slots_of(layer.spec.num_experts, to_dict(slots))
    return num_experts, logical_of, first_of


def source_of(
    source: tuple[Checkpoint | Feed, int] | None,
) -> tuple[_conclave.Checkpoint | None, _conclave.Feed | None, int]:
    """The checkpoint or the feed that experts are read from, and the number of the layer."""
    if source is None:
        return None, None, 0
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        raise ConclaveTypeError(
            "source: expected a Checkpoint or a Feed, and the number of a layer, found "
            f"{type(source).__name__}"
        )
    opened, layer = source
    layer = _limits.integer("source[1]", layer, -_MOST_LAYERS, _MOST_LAYERS)
    if isinstance(opened, Feed):
        return None, opened._core, layer
    if not isinstance(opened, Checkpoint):
        raise ConclaveTypeError(
            f"source[0]: expected a Checkpoint or a Feed, found {type(opened).__name__}"
        )
    return opened._core, None, layer
