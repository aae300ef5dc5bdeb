"""New weights for a layer that serves, as a transaction, and weights that processes share."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conclave import _conclave, _limits
from conclave._process_groups import communicator_of
from conclave._shapes import as_loaded
from conclave._transaction import Transaction, reason_of
from conclave._weights import (
    ArrayForm,
    checked_form,
    given_weights,
    refuse_beside,
    refuse_form,
)
from conclave.checkpoint import Checkpoint, Feed
from conclave.errors import ConclaveTypeError, ConclaveValueError, Error
from conclave.spec import MoeSpec, to_dict

if TYPE_CHECKING:
    from conclave._layer_base import LayerBase

# Arrays with an entry for each routed expert.
_ROUTED = re.compile(r"(gate_up|gate|up|down)(_|$)")

Array = Any  # numpy, torch, or anything with __dlpack__

_MOST = 2**31 - 1
MOST_THREADS = 1024
_MOST_VERSION = 2**64 - 1


def _named_experts(experts: Any) -> list[int] | None:
    """Experts that an argument names, None for all."""
    if experts is None:
        return None
    return _limits.some("experts", _limits.integers("experts", experts, 0, _MOST))


def _named_tensors(tensors: Any) -> list[str] | None:
    if tensors is None:
        return None
    return _limits.some("tensors", _limits.texts("tensors", tensors))


def _map_of(experts: Sequence[int] | None, num_experts: int) -> list[int]:
    """The index of each expert in arrays that hold these alone."""
    if experts is None:
        return []
    local_of = [-1] * num_experts
    for index, expert in enumerate(experts):
        if 0 <= expert < num_experts:
            local_of[expert] = index
    return local_of


def _check_counts(
    arrays: Mapping[str, Any], experts: Sequence[int] | None, num_experts: int
) -> None:
    """Raises unless arrays of routed experts hold those that are named, and no others."""
    if experts is None:
        return
    for name, array in arrays.items():
        if _ROUTED.match(name) is None:
            continue
        found = len(array)
        if found == len(experts) or (name.endswith("_input_scale") and found == num_experts):
            continue
        raise ConclaveValueError(f"{name}: expected {len(experts)} experts, found {found}")


class SharedWeights:
    """Weights that another process has published (`SharedWeightsWriter`), as they are now.

    Nothing is copied: a layer packs them from the other process's memory. Where the writer goes on
    meanwhile, what a layer has read of them is not used.

    Args:
        path: the writer's.
        verify: compute the checksum of all bytes first. Without it a reader relies on the marks
            that a writer sets before and after it writes.

    Raises:
        ConclaveFileError: there is no such file; a writer is at work or died; the checksum differs.
        ConclaveValueError: the file is none of a writer's, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self._core = _conclave.SharedWeights(
            _limits.path("path", path), _limits.flag("verify", verify)
        )

    @property
    def version(self) -> int:
        """The number that the writer gave it."""
        return self._core.version

    @property
    def layer(self) -> int:
        """The number of the layer that the writer named."""
        return self._core.layer

    @property
    def tensors(self) -> dict[str, tuple[int, ...] | None]:
        """The names of what is there, each with its experts; None for all of them."""
        return {name: tuple(experts) or None for name, experts in self._core.tensors()}

    def check_unchanged(self) -> None:
        """Raises ConclaveFileError if a writer has begun another version since."""
        self._core.check_unchanged()


class SharedWeightsWriter:
    """Puts a layer's weights, or a part of them, where other processes read them.

    A trainer makes one for each layer and publishes a version after each step: the arrays are
    copied to a file in memory, between two marks by which readers know that it is complete.

    Args:
        path: of the file, best in /dev/shm. It is made anew; the last user removes it.
        spec: the layer's, with all of its sizes.
        layer: any number that tells layers apart.
        experts: those that the arrays hold, in their order; by default all.
        gate_up_order, shared_gate_up_order, transposed, weights: as in `Layer.from_tensors`. Their
            names, shapes and types are those of every version; `publish` writes the values.

    Raises:
        Error: naming the array, with what was expected and found.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: MoeSpec | Mapping[str, Any],
        *,
        layer: int = 0,
        experts: Sequence[int] | None = None,
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        **weights: Array | Sequence[Array] | None,
    ) -> None:
        fields = to_dict(spec, "spec")
        self._experts = _named_experts(experts)
        self._num_experts = int(fields.get("num_experts", 0))
        arrays = given_weights(weights)
        _check_counts(arrays, self._experts, self._num_experts)
        form = checked_form(gate_up_order, shared_gate_up_order, transposed, None)
        self._core = _conclave.SharedWeightsWriter(
            _limits.path("path", path),
            fields,
            arrays,
            *form.orders,
            form.transposed,
            _map_of(self._experts, self._num_experts),
            _limits.integer("layer", layer, 0, _MOST_VERSION),
        )

    def publish(
        self, *, version: int | None = None, **weights: Array | Sequence[Array] | None
    ) -> int:
        """Writes the arrays and returns their version: by default one more than the last.

        Raises:
            ConclaveValueError: other arrays than the writer was made for, or a version that is not
                larger; then readers keep the last one.
        """
        if version is not None:
            version = _limits.integer("version", version, 1, _MOST_VERSION)
        arrays = given_weights(weights)
        _check_counts(arrays, self._experts, self._num_experts)
        return self._core.publish(arrays, version or 0)

    @property
    def version(self) -> int:
        """The last one that was published, 0 before any."""
        return self._core.version


class Refit(Transaction):
    """New weights on their way into a layer; `Layer.refit` makes it.

    As a context manager it commits at the end, or withdraws where an exception leaves it, so that
    `commit` of other ranks, and `stage` with a communicator, raise at once and name this one.
    """

    def __init__(self, layer: LayerBase, core: _conclave.Refit, communicator: Any) -> None:
        self._layer = layer
        self._core = core
        self._communicator = communicator

    def stage(
        self,
        checkpoint: Checkpoint | Feed | SharedWeights | str | os.PathLike[str] | None = None,
        layer: int | None = None,
        *,
        experts: Sequence[int] | None = None,
        tensors: Sequence[str] | None = None,
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        expert_map: Sequence[int] | None = None,
        communicator: Any = None,
        root: int = 0,
        **weights: Array | Sequence[Array] | None,
    ) -> None:
        """Reads and packs all that the refit names, or the part that is named here.

        Forwards of other threads go on, but for a refit in place. What fails may be staged again.

        Args:
            checkpoint, layer: a model directory, a `Feed`, or `SharedWeights`, and the number of
                the layer there, which shared weights do not need.
            experts, tensors: the part that comes now, as in `Layer.refit`.
            weights: instead, arrays by name as in `Layer.from_tensors`, with its other arguments.
                Where experts are named, here or in `Layer.refit`, arrays hold these experts alone,
                in this order; an `expert_map` says otherwise.
            communicator, root: one rank of these, the root, has the weights and sends them to the
                others, which give none; a group of torch.distributed likewise. All of them call,
                and from then on take part in `commit`, so that all have the new weights or none.
                By default those of `Layer.refit`, if it was given some.

        Raises:
            Error: naming the file, tensor or argument; the old weights stay.
            ConclaveCommError: where another rank has failed, with the reason. Where it has
                withdrawn, this refit has ended as well.
        """
        self._has_told = False
        if communicator is None:
            communicator = self._communicator
        ranks = communicator_of(communicator, "communicator")
        try:
            root = _limits.integer("root", root, 0, _MOST)
        except Error as error:
            self._core.send_over(ranks, 0)
            self._core.give_up(reason_of(error))
            raise
        self._core.send_over(ranks, root)
        rank = root if ranks is None else ranks.rank
        receives = rank != root
        try:
            named = _named_experts(experts)
            part = (named or [], _named_tensors(tensors) or [])
            given = given_weights(weights)
            if receives:
                self._stage_received(checkpoint is not None or bool(given), rank, root, part)
            elif checkpoint is not None:
                refuse_beside("a checkpoint", given)
                refuse_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
                self._stage_loaded(checkpoint, layer, part)
            else:
                refuse_beside("arrays", {"layer": layer})
                form = checked_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
                self._stage_arrays(given, form, expert_map is not None, named, part)
        except BaseException as error:
            self._core.give_up(reason_of(error))
            raise

    def _stage_received(
        self, has_weights: bool, rank: int, root: int, part: tuple[list[int], list[str]]
    ) -> None:
        if has_weights:
            raise ConclaveTypeError(
                f"communicator: rank {rank} receives what rank {root} has, and gives no weights"
            )
        self._core.stage_received(*part)

    def _stage_loaded(
        self,
        checkpoint: Checkpoint | Feed | SharedWeights | str | os.PathLike[str],
        layer: int | None,
        part: tuple[list[int], list[str]],
    ) -> None:
        if isinstance(checkpoint, SharedWeights):
            self._core.stage_shared(checkpoint._core, *part)
            return
        layer = _limits.layer("layer", layer)
        if isinstance(checkpoint, Feed):
            self._core.stage_feed(checkpoint._core, layer, *part)
            return
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(_limits.path("checkpoint", checkpoint))
        self._core.stage_checkpoint(checkpoint._core, layer, *part)

    def _stage_arrays(
        self,
        given: dict[str, Any],
        form: ArrayForm,
        has_map: bool,
        experts: Sequence[int] | None,
        part: tuple[list[int], list[str]],
    ) -> None:
        spec = self._layer._core.spec()
        arrays, orders = as_loaded(given, form.orders, form.transposed, spec)
        named = experts if experts is not None else self._experts
        local_of = form.local_of
        if not has_map:
            _check_counts(arrays, named, spec["num_experts"])
            local_of = _map_of(named, spec["num_experts"])
        self._core.stage_arrays(arrays, *orders, form.transposed, local_of, *part)

    _experts: Sequence[int] | None = None

    @property
    def is_staged(self) -> bool:
        """Whether all that the refit names is staged."""
        return self._core.is_staged

    def commit(self) -> None:
        """Makes the staged weights the layer's between two forwards.

        On every rank of a layer that is split over ranks, as a forward; also where staging failed,
        so that the others learn of it and keep their old weights as well.

        Raises:
            ConclaveRuntimeError: something is not staged.
            ConclaveCommError: on a rank that could commit where another could not.
        """
        self._has_told = True
        self._core.commit()
        self._is_open = False

    def rollback(self) -> None:
        """Ends it with the old weights; after some were overwritten in place, with none. Other
        ranks are not told: their commit ends with its deadline."""
        self._core.rollback()
        self._is_open = False

    def withdraw(self, reason: str = "") -> None:
        """Rolls back and tells the other ranks, in the place of `commit`, or of `stage` with a
        communicator, and on the same terms: theirs raises ConclaveCommError with this rank as its
        `peer` and the reason, and they keep their old weights too. Waits for them, no longer than
        the communicator's deadline."""
        self._core.withdraw(_limits.text("reason", reason))
        self._is_open = False

    def __enter__(self) -> Refit:
        return self


def begin_refit(
    layer: LayerBase,
    mode: str,
    experts: Sequence[int] | None,
    tensors: Sequence[str] | None,
    epoch: int | None,
    threads: int,
    keeps_memory: bool,
    refusal: str,
    communicator: Any,
) -> Refit:
    """A refit of the layer. Where it is refused, other ranks hear so, unless `refusal` is
    "silent"."""
    ranks = None
    try:
        ranks = communicator_of(communicator, "communicator")
        if refusal not in ("withdraw", "silent"):
            raise ConclaveValueError(f"refusal: expected 'withdraw' or 'silent', found {refusal!r}")
        named = _named_experts(experts)
        core = _conclave.Refit(
            layer._core,
            _limits.text("mode", mode),
            named or [],
            _named_tensors(tensors) or [],
            0 if epoch is None else _limits.integer("epoch", epoch, 1, 2**63 - 1),
            _limits.integer("threads", threads, 1, MOST_THREADS),
            _limits.flag("keeps_memory", keeps_memory),
            ranks,
        )
    except BaseException as error:
        if refusal != "silent":
            withdraw_refit(layer, ranks, reason_of(error))
        raise
    refit = Refit(layer, core, ranks)
    refit._experts = named
    return refit


def withdraw_refit(layer: LayerBase, communicator: Any, reason: str) -> None:
    """Tells the other ranks that this one has nothing to commit or to send."""
    with contextlib.suppress(Error):  # after a fork nobody is there to be told
        ranks = communicator_of(communicator, "communicator")
        _conclave.withdraw_refit(layer._core, ranks, _limits.text("reason", reason))
