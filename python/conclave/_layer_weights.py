"""New weights for a layer that is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from conclave import _conclave, _frameworks, _limits
from conclave._layer_base import Array, LayerBase
from conclave._shapes import as_loaded
from conclave._weights import checked_form, given_weights, refuse_beside, refuse_form
from conclave.checkpoint import Checkpoint, Feed
from conclave.refit import Refit, begin_refit, withdraw_refit


class LayerWeights(LayerBase):
    """What changes the weights of a `Layer`."""

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
        mode = _limits.text("mode", mode)
        if checkpoint is not None:
            layer = _limits.layer("layer", layer)
            refuse_beside("a checkpoint", weights)
            refuse_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
            if isinstance(checkpoint, Feed):
                self._core.reload_from_feed(checkpoint._core, layer, mode)
                return
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint(_limits.path("checkpoint", checkpoint))
            self._core.reload_from_checkpoint(checkpoint._core, layer, mode)
            return
        refuse_beside("arrays", {"layer": layer})
        form = checked_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
        given, orders = as_loaded(
            given_weights(weights), form.orders, form.transposed, self._core.spec()
        )
        self._core.reload_from_arrays(given, mode, *orders, form.transposed, form.local_of)

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
        communicator: Any = None,
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
            communicator: ranks of which one sends the others its weights (`Refit.stage`), or their
                group of torch.distributed. Where it is named here, they also hear of a rank that
                is refused here, or whose block raises before its first `stage`.

        Raises:
            ConclaveValueError: an expert or tensor that the layer does not have, or an epoch that
                is not larger.
            ConclaveRuntimeError: another refit or a migration is under way.
            ConclaveUnsupportedError: experts that are read where their source has them, in part
                or on a GPU.
        """
        return begin_refit(
            self, mode, experts, tensors, epoch, threads, keeps_memory, refusal, communicator
        )

    def withdraw_refit(self, *, communicator: Any = None, reason: str = "") -> None:
        """In the place of `Refit.commit`, for a rank that has no refit where the others have one:
        it was refused, or did not find its weights. The others' commit raises ConclaveCommError
        with this rank as its `peer` and the reason, and so does `Refit.stage` over the
        `communicator`; waits for them, no longer than the communicator's deadline."""
        withdraw_refit(self, communicator, reason)

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
        handle = _frameworks.stream_of(None, stream) if self._enqueues else 0
        replay = _conclave.Replay(self._core, handle)
        try:
            yield
        finally:
            replay.end()

    def content_hash(self) -> int:
        """XXH3-64 of the weights that this rank holds: equal for layers of one plan with equal
        weights, whatever way these came. Reads all of them."""
        return _conclave.content_hash(self._core)
