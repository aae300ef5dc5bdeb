"""New weights for a patched model, as one transaction of all its layers."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conclave import _limits
from conclave._transaction import Transaction, reason_of
from conclave.errors import (
    ConclaveCheckpointError,
    ConclaveCommError,
    ConclaveFileNotFoundError,
    ConclaveRuntimeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)
from conclave.ranks import Communicator
from conclave.refit import MOST_THREADS
from conclave.transformers._coded_traits import is_coded
from conclave.transformers._patch import is_balanced, replaced_in
from conclave.transformers._places import Place, as_given, places_below
from conclave.transformers._refitted import RefittedBlock
from conclave.transformers._split import is_sharded, rank_error
from conclave.transformers._turns import Turns

_PHASE = "refit of a model: agree to commit"
_WITHDRAWN, _NOT_READY, _READY = range(3)
_REASON_BYTES = 232
_FIELDS = ("whether the refit goes on", "the epoch", "the blocks")


class ModelRefit(Transaction):
    """New weights on their way into a patched model; `refit` makes it.

    As a context manager it commits at the end, or withdraws where an exception leaves it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        turns: Turns,
        replaced: Mapping[str, Any],
        ranks: Communicator | None,
        epoch: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """`replaced` has what stands in for each path that changes."""
        self.epoch = turns.epoch + 1 if epoch is None else epoch
        if self.epoch <= turns.epoch:
            raise ConclaveValueError(
                f"epoch: expected more than {turns.epoch}, the model's, found {self.epoch}"
            )
        if turns.is_refitting:
            raise ConclaveRuntimeError("refit: another refit of the model is under way")
        self._model, self._turns, self._ranks = model, turns, ranks
        self._places = places_below(model)
        self._values: dict[Place, torch.Tensor] = {}
        self._blocks: dict[str, RefittedBlock] = {}
        self._packed_later: dict[str, Any] = {}
        self._needed = {path: self._places_of(path, one) for path, one in replaced.items()}
        # Tensors may come one by one, and be many: no step looks at all of them.
        self._names = {place: name for name, place in reversed(self._places.items())}
        self._paths_of: dict[Place, list[str]] = {}
        for path, block in self._blocks.items():
            for place in block.places:
                self._paths_of.setdefault(place, []).append(path)
        turns.is_refitting = True
        try:
            for path, one in replaced.items():
                self._begin(path, one, dict(options) | {"epoch": self.epoch})
        except BaseException:
            self.rollback()
            raise

    def _places_of(self, path: str, replacement: Any) -> list[Place]:
        block = replacement.refitted()
        if block is not None:
            self._blocks[path] = block
            return block.places
        return list(places_below(self._model, path).values())

    def _begin(self, path: str, replacement: Any, options: Mapping[str, Any]) -> None:
        replacement.pack_again()
        if path in self._blocks:
            try:
                self._blocks[path].begin(**options)
                return
            except ConclaveUnsupportedError:  # a layer on a GPU
                del self._blocks[path]
        self._packed_later[path] = replacement

    # Staging

    def stage(self, weights: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> None:
        """Takes new values, and packs every block of which all have come.

        Forwards of other threads go on. May be called again with other tensors, as they arrive;
        what comes twice counts as it came last.

        Args:
            weights: tensors by the names of the model's own `state_dict`, of blocks or of anything
                else, whole on every rank. They are read until the commit: do not write to them.
                Or a directory that `save_pretrained` wrote, of a model of the same class and sizes,
                which transformers reads into memory as a second model.

        Raises:
            Error: naming the tensor or the directory. Then nothing of this call is taken, unless
                packing failed: the block that failed has to come again.
        """
        self._require_open()
        if not isinstance(weights, Mapping):
            weights = _state_of(self._model, _limits.path("weights", weights))
        given = {}
        for name, value in weights.items():
            if name not in self._places:
                raise ConclaveValueError(f"weights: the model's state_dict has no {name!r}")
            given[self._places[name]] = as_given(name, value, self._places[name])
        self._has_told = False
        self._values |= given
        touched = {path for place in given for path in self._paths_of.get(place, ())}
        for path in [path for path in self._blocks if path in touched]:
            if not self._lacks(path):
                self._blocks[path].stage(self._values)

    def _lacks(self, path: str) -> str:
        """A place of a block without a value, by its name; empty if there is none."""
        missing = (place for place in self._needed[path] if place not in self._values)
        return next((self._names[place] for place in missing), "")

    @property
    def is_staged(self) -> bool:
        """Whether all weights of all blocks that change are staged."""
        return not self._why_not()

    def _why_not(self) -> str:
        for path in self._needed:
            if name := self._lacks(path):
                return f"{path}: {name} is not staged"
            if path in self._blocks and not self._blocks[path].is_staged:
                return f"{path}: what was staged last could not be packed"
        return ""

    # Ending it

    def commit(self) -> None:
        """Makes the staged weights the model's, between two of its forwards: waits for those under
        way, while new ones wait.

        On every rank of a model that is spread over ranks, between the same forwards: all of them
        commit, or none does.

        Raises:
            ConclaveRuntimeError: something is not staged, or weights of the model were changed
                while the refit was under way; then the model keeps the old ones.
            ConclaveCommError: another rank could not commit; likewise.
        """
        self._require_open()
        reason = self._why_not() or self._why_other()
        prepared, failure = {}, None
        try:
            if not reason:
                prepared = {place: place.prepared(value) for place, value in self._writes()}
        except Exception as error:  # the other ranks must hear of it
            failure = error
        self._has_told = True
        why = reason_of(failure) if failure is not None else reason
        self._agree(_NOT_READY if why else _READY, why)
        if failure is not None:
            raise failure
        if reason:
            raise ConclaveRuntimeError(f"refit: {reason}")
        with self._turns.closed():
            for block in self._blocks.values():
                block.require_same()
            failures = self._exchange(prepared)
        self._end()
        if failures:
            raise failures[0]

    def _why_other(self) -> str:
        try:
            for block in self._blocks.values():
                block.require_same()
        except ConclaveRuntimeError as error:
            return str(error)
        return ""

    def _writes(self) -> list[tuple[Place, torch.Tensor]]:
        """All but what a layer alone holds."""
        packed = {place for block in self._blocks.values() for place in block.places}
        return [
            (place, value)
            for place, value in self._values.items()
            if place not in packed or not place.is_released
        ]

    def _exchange(self, prepared: Mapping[Place, torch.Tensor]) -> list[BaseException]:
        """Goes on where a step fails, so that all weights are the new ones."""
        failures: list[BaseException] = []

        def attempt(step: Any, *arguments: Any) -> None:
            try:
                step(*arguments)
            except BaseException as error:  # an interrupt too must leave no mixture
                failures.append(error)

        def write(place: Place) -> None:
            place.write(prepared[place])

        for block in self._blocks.values():
            attempt(block.commit, write)
        packed = {place for block in self._blocks.values() for place in block.places}
        for place in prepared:
            if place not in packed:
                attempt(write, place)
        for replacement in self._packed_later.values():
            attempt(replacement.pack_again)
        self._turns.epoch = self.epoch
        return failures

    def rollback(self) -> None:
        """Ends it with the old weights. Other ranks are not told: their commit ends with its
        deadline."""
        for block in self._blocks.values():
            block.rollback()
        self._end()

    def withdraw(self, reason: str = "") -> None:
        """Rolls back and tells the other ranks, in the place of `commit`: theirs raises
        ConclaveCommError with this rank as its `peer` and the reason."""
        try:
            if self._is_open:
                withdraw_from(self._ranks, _limits.text("reason", reason))
        except ConclaveCommError:
            return  # it says what this rank knows, or that nobody is there to be told
        finally:
            self.rollback()

    def _agree(self, state: int, why: str = "") -> None:
        """Raises ConclaveCommError on ranks that could go on, where one cannot."""
        if self._ranks is None:
            return
        mine = (state, self.epoch, zlib.crc32("\n".join(self._needed).encode()))
        found = _all_say(self._ranks, mine, why)
        if state != _READY:
            return
        for rank, (theirs, reason) in enumerate(found):
            for field, value, other in zip(_FIELDS, mine, theirs, strict=True):
                if value != other:
                    what = f"ranks differ in {field}"
                    raise rank_error(rank, _PHASE, f"{what}: {reason}" if reason else what)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ConclaveRuntimeError("refit: it has been committed or rolled back")

    def _end(self) -> None:
        if self._is_open:
            self._turns.is_refitting = False
        self._is_open = False
        self._values.clear()

    def __enter__(self) -> ModelRefit:
        return self


def _all_say(
    ranks: Communicator, mine: tuple[int, int, int], why: str
) -> list[tuple[list[int], str]]:
    """What every rank says of `_FIELDS`, and why it does not go on."""
    text = why.encode("utf-8", "replace")[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    numbers = torch.tensor(mine, dtype=torch.int64).view(torch.uint8)
    send = torch.cat([numbers, torch.frombuffer(bytearray(text), dtype=torch.uint8)])
    size = send.numel()
    found = torch.empty(ranks.size * size, dtype=torch.uint8)
    ranks.all_gather(send, found, [size] * ranks.size, phase=_PHASE)
    return [
        (
            one[: numbers.numel()].clone().view(torch.int64).tolist(),
            bytes(one[numbers.numel() :].tolist()).rstrip(b"\0").decode("utf-8", "ignore"),
        )
        for one in found.view(-1, size)
    ]


def withdraw_from(ranks: Communicator | None, why: str) -> None:
    """Says no in the commit of other ranks. Raises ConclaveCommError where they do not come."""
    if ranks is not None:
        _all_say(ranks, (_WITHDRAWN, 0, 0), why)


def _state_of(model: Any, directory: str) -> dict[str, torch.Tensor]:
    """Weights of a directory by the names that the model has for them."""
    if not os.path.isdir(directory):
        raise ConclaveFileNotFoundError(f"{directory}: no such directory")
    if not hasattr(type(model), "from_pretrained"):
        raise ConclaveUnsupportedError(
            f"{type(model).__name__} does not read directories: stage a state_dict"
        )
    try:
        other, info = type(model).from_pretrained(
            directory, dtype=model.dtype, output_loading_info=True
        )
    except Exception as error:
        raise ConclaveCheckpointError(f"{directory}: {error}") from error
    if info["missing_keys"]:
        raise ConclaveCheckpointError(f"{directory}: it lacks {min(info['missing_keys'])}")
    return dict(other.state_dict())


def _ranks_of(replaced: Mapping[str, Any]) -> Communicator | None:
    """Over which the model's blocks are spread; None where this process has them whole."""
    splits = (getattr(one, "_split", None) for one in replaced.values())
    return next((split.communicator for split in splits if split is not None), None)


def _require_refits(model: Any, replaced: Mapping[str, Any]) -> None:
    """Raises ConclaveUnsupportedError for what has no transaction."""
    if is_balanced(model):
        raise ConclaveUnsupportedError(
            "model: it was patched with eplb, whose steps would move experts of a refit; "
            "load_state_dict on all ranks serves"
        )
    for path in replaced:
        if any(is_coded(module) for module in model.get_submodule(path).modules()):
            raise ConclaveUnsupportedError(f"{path}: it holds codes, which no state_dict has")
    if is_sharded(model) and _ranks_of(replaced) is None:
        raise ConclaveUnsupportedError(
            "model: it is spread over ranks, and none of its blocks was replaced whole"
        )


def _chosen(replaced: Mapping[str, Any], paths: Sequence[str] | None) -> dict[str, Any]:
    """Of what was replaced, the paths that are named. Raises ConclaveValueError."""
    if paths is None:
        return dict(replaced)
    for path in paths:
        if path not in replaced:
            raise ConclaveValueError(f"paths: no module was replaced at {path!r}")
    return {path: replaced[path] for path in replaced if path in set(paths)}


def refit(
    model: Any,
    *,
    paths: Sequence[str] | None = None,
    epoch: int | None = None,
    mode: str = "staged",
    threads: int = 1,
    keeps_memory: bool = False,
) -> ModelRefit:
    """Begins a transaction that gives a patched model new weights while it serves: a forward of
    the model sees the old or the new ones in all of its layers, never a mixture.

        with conclave.transformers.refit(model, epoch=step) as refit:
            refit.stage(trainer.state_dict())

    Blocks that were replaced whole are packed beside the weights that serve; where the experts
    alone were replaced, and on a GPU, they are packed while forwards wait. The model's own
    parameters change with them, but for those that were released. On all ranks of a model that is
    spread.

    Args:
        model: a patched one.
        paths: of the blocks that change, as the report of `patch` has them; by default all.
        epoch: the number that `refit_epoch` returns after the commit, such as a trainer's step; by
            default one more.
        mode: "staged" or "staged_copy", as of `Layer.refit`, like what follows.
        threads: that pack, beside those of forwards.
        keeps_memory: keep the memory of this refit for the next one.

    Where ranks share the model and this one is refused here, it takes part in the others' commit
    before it raises, and says no: theirs raises ConclaveCommError with this rank as its `peer`.

    Raises:
        ConclaveValueError: the model is not patched; another path; an epoch that is not larger.
        ConclaveRuntimeError: another refit of the model is under way.
        ConclaveUnsupportedError: a model that was patched with `eplb`, codes in the place of
            weights, or several ranks without a block that was replaced whole.
    """
    replaced, turns = replaced_in(model)
    ranks = _ranks_of(replaced)
    try:
        if mode not in ("staged", "staged_copy"):
            raise ConclaveValueError(f"mode: expected 'staged' or 'staged_copy', found {mode!r}")
        _require_refits(model, replaced)
        if epoch is not None:
            epoch = _limits.integer("epoch", epoch, 1, 2**63 - 1)
        options = {
            "mode": mode,
            "threads": _limits.integer("threads", threads, 1, MOST_THREADS),
            "keeps_memory": _limits.flag("keeps_memory", keeps_memory),
        }
        chosen = _chosen(replaced, paths if paths is None else _limits.texts("paths", paths))
        return ModelRefit(model, turns, chosen, ranks, epoch, options)
    except BaseException as error:  # the ranks that began must not wait for this one
        with contextlib.suppress(ConclaveCommError):
            withdraw_from(ranks, reason_of(error))
        raise


def refit_epoch(model: Any) -> int:
    """The number of the last refit of a patched model that was committed, 0 before any.

    Raises ConclaveValueError for a model that is not patched.
    """
    _, turns = replaced_in(model)
    return turns.epoch
