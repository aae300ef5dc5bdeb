"""Where a layer's experts lie, and on which ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave, _limits, _runtime
from conclave._layer_base import (
    MOST_BYTES,
    MOST_LAYERS,
    Array,
    LayerBase,
    LayerT,
    Ranks,
    copying,
    counted,
    ranks_of,
    required_ranks,
    slots_of,
    source_of,
    split_of,
)
from conclave._process_groups import communicator_of
from conclave._shapes import as_loaded
from conclave._weights import checked_form, given_weights
from conclave.balance import ExpertSlots
from conclave.checkpoint import Checkpoint, Feed
from conclave.errors import ConclaveTypeError
from conclave.ranks import Communicator
from conclave.spec import LayerOptions, MoeSpec, ParallelSpec, given_fields, to_dict


class LayerRanks(LayerBase):
    """What moves the experts of a `Layer`, or the layer itself."""

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
            _limits.integer("piece_bytes", piece_bytes, 0, MOST_BYTES),
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
        self: LayerT,
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
    ) -> LayerT:
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
        experts, slices = ranks_of(communicator, tensor_communicator, self._core.device)
        context = _runtime.context(self._core.device, self._core.isa, experts, slices)
        split = split_of(parallel, experts, slices)
        if old_ranks is not None:
            rank = 0 if experts is None else experts.rank
            old_ranks = _limits.integers("old_ranks", old_ranks, -MOST_LAYERS, MOST_LAYERS)
            before = self._core.parallel()
            if self._core.placement_epoch > 0:
                before = _conclave.with_slots(before, *self._core.slots())
            split = _conclave.without_ranks(
                self._core.spec()["num_experts"], before, old_ranks, rank
            )
        given = given_weights(weights)
        if checkpoint is None and not given:
            return type(self)(self._core.on_ranks(context, split))
        if checkpoint is not None:
            layer = _limits.layer("layer", layer)
            if isinstance(checkpoint, Feed):
                return type(self)(
                    self._core.on_ranks_from_feed(context, split, checkpoint._core, layer)
                )
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint(_limits.path("checkpoint", checkpoint))
            return type(self)(
                self._core.on_ranks_from_checkpoint(context, split, checkpoint._core, layer)
            )
        form = checked_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
        given, orders = as_loaded(given, form.orders, form.transposed, self._core.spec())
        return type(self)(
            self._core.on_ranks_from_arrays(
                context, split, given, *orders, form.transposed, form.local_of
            )
        )

    def regroup(
        self: LayerT,
        everyone: Ranks,
        communicator: Ranks | None = None,
        *,
        tensor_communicator: Ranks | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        source: tuple[Checkpoint | Feed, int] | None = None,
        processor_share: float = 1,
        piece_bytes: int = 256 << 10,
    ) -> LayerT:
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
        experts, slices = ranks_of(communicator, tensor_communicator, self._core.device)
        context = _runtime.context(self._core.device, self._core.isa, experts, slices)
        return type(self)(
            self._core.regroup(
                context,
                required_ranks(everyone, "everyone"),
                None if parallel is None else to_dict(parallel, "parallel"),
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
        cls: type[LayerT],
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
    ) -> LayerT:
        """A layer that other ranks have, on this one as well: experts and all else come from them,
        as `regroup` says.

        Args:
            spec, options: those of the layer, `Layer.spec` and what it was made with.
            everyone, communicator, parallel, source, ...: as in `regroup`.
            device, isa, count: as in `from_checkpoint`.

        Raises:
            ConclaveCommError: naming what ranks disagree on, as `regroup` does.
        """
        experts, slices = ranks_of(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        return cls(
            _conclave.Layer.join(
                context,
                to_dict(spec, "spec"),
                given_fields("options", options),
                counted(count, context),
                required_ranks(everyone, "everyone"),
                None if parallel is None else to_dict(parallel, "parallel"),
                *source_of(source),
                *copying(processor_share, piece_bytes),
            )
        )
