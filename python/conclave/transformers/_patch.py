"""Whole MoE blocks of a loaded model, and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
import weakref
from typing import Any

import torch

from conclave.errors import (
    ConclaveCommError,
    ConclaveRuntimeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from conclave.transformers._balancer import ModelBalancer, blocks_of
from conclave.transformers._block import PatchedBlock
from conclave.transformers._called_list import PatchedCalls, has_forward
from conclave.transformers._coded_traits import is_coded
from conclave.transformers._dispatch import IMPLEMENTATION, dispatches
from conclave.transformers._eplb import BlockPlacing, EplbOptions, options_of, require_fit
from conclave.transformers._experts import ask_again, experts_forward
from conclave.transformers._find import Candidate, find_candidates
from conclave.transformers._guard import guard, unguard
from conclave.transformers._list_block import PatchedList
from conclave.transformers._owner import hidden_size_of, owners_of
from conclave.transformers._packed import (
    forget,
    packed_experts,
    release_when_packed,
    require_countable,
)
from conclave.transformers._pair import PatchedPair
from conclave.transformers._probe import probe_hidden, require_called
from conclave.transformers._release import (
    freed_of,
    guard_released,
    modules_with_tied_weights,
)
from conclave.transformers._split import is_sharded, require_no_fsdp
from conclave.transformers._tally import forget_calls
from conclave.transformers._traits import NotOurs, local_part
from conclave.transformers._turns import Turns

_patches: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()
_paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[torch.nn.Module, Turns] = weakref.WeakKeyDictionary()
_balancers: weakref.WeakKeyDictionary[torch.nn.Module, ModelBalancer] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class PatchedModule:
    """One module of a model and what became of it."""

    path: str  # "model.layers.0.mlp"
    module: str  # the name of its class
    replaced: str  # "block"; "experts": the framework goes on routing; "": not replaced
    reason: str  # why not the whole block


@dataclasses.dataclass(frozen=True)
class PatchReport:
    """What `patch` did. Sizes in bytes."""

    modules: tuple[PatchedModule, ...]
    model_bytes_before: int  # parameters and buffers
    model_bytes_after: int
    packed_bytes: int  # of the layers that were made
    resident_before: int  # memory of the process; 0 where the system does not say
    resident_after: int

    @property
    def replaced(self) -> tuple[PatchedModule, ...]:
        return tuple(m for m in self.modules if m.replaced)

    @property
    def not_replaced(self) -> tuple[PatchedModule, ...]:
        return tuple(m for m in self.modules if not m.replaced)

    def __str__(self) -> str:
        lines = [
            f"{m.path}  {m.module}  {m.replaced or 'not replaced'}"
            + (f": {m.reason}" if m.reason else "")
            for m in self.modules
        ]
        mib = 1 / 2**20
        lines.append(
            f"model {self.model_bytes_before * mib:.1f} -> {self.model_bytes_after * mib:.1f} MiB, "
            f"packed {self.packed_bytes * mib:.1f} MiB, process "
            f"{self.resident_before * mib:.1f} -> {self.resident_after * mib:.1f} MiB"
        )
        return "\n".join(lines)


class _PatchedExperts:
    """An experts module whose forward is the backend's, whatever the configuration says."""

    def __init__(self, candidate: Candidate, hidden_size: int, is_tied: bool) -> None:
        module = candidate.experts
        if not dispatches(module) and not is_coded(module):
            raise NotOurs(f"{type(module).__name__} has no exchangeable forward")
        require_countable(packed_experts(module, hidden_size).traits.tensors(module))
        if not dispatches(module):
            require_called(candidate.block, module, probe_hidden(candidate.block, hidden_size))
        self._module: Any = weakref.ref(module)
        self._hidden_size = hidden_size
        self._is_tied = is_tied
        self._former: Any = None  # a configuration of the whole model

    @property
    def released_bytes(self) -> int:
        freed = freed_of(self._module()).values()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in freed)

    def install(self) -> None:
        module = self._module()
        if is_sharded(module):
            self._former = module.config
            # A plan's own forward stands there, which sums over ranks; it goes on to dispatch.
            module.config = copy.copy(module.config)
            module.config._experts_implementation = IMPLEMENTATION
            release_when_packed(module, False)
            ask_again(module)
            return
        module.forward = types.MethodType(experts_forward, module)
        release_when_packed(module, False)

    def remove(self) -> None:
        module = self._module()
        if getattr(module.__dict__.get("forward"), "__func__", None) is experts_forward:
            del module.forward
        if self._former is not None:
            module.config = self._former
        release_when_packed(module, False)
        forget(module)

    def release(self) -> int:
        """Its own copy is freed when it is packed, at the first call."""
        release_when_packed(self._module(), not self._is_tied)
        return 0

    def packed_bytes(self) -> int:
        return 0  # packed at the first call

    def refitted(self) -> None:
        """Its arrays are read from the module, so that they are packed when this has the values."""
        return

    def pack_again(self) -> None:
        """Now, if something is packed and the weights have changed since."""
        packed_experts(self._module(), self._hidden_size).pack_again(self._module())


def _bytes_of(model: torch.nn.Module) -> int:
    every = map(local_part, (*model.parameters(), *model.buffers()))
    tensors = {t.data_ptr(): t for t in every}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    import mmap

    return pages * mmap.PAGESIZE


def _replace_block(model: Any, candidate: Candidate, eplb: EplbOptions | None) -> Any:
    """A block by the configuration of a model that holds it. Raises NotOurs or Error: of the
    outermost, which says most."""
    first: Exception | None = None
    kind = PatchedPair if candidate.in_layer else PatchedBlock
    placing = None if eplb is None else BlockPlacing(eplb, candidate.path)
    for owner, inside in owners_of(model, candidate):
        try:
            return kind(owner, inside, model, placing)
        except ConclaveCommError:  # the ranks are not together any more: no other way is tried
            raise
        except (NotOurs, Error) as error:
            first = first or error
    raise first or NotOurs("no model with a configuration holds the block")


def _replace(
    model: Any, candidate: Candidate, eplb: EplbOptions | None
) -> tuple[Any, PatchedModule]:
    """The best replacement that computes the same, and what there is to say about it."""
    name = type(candidate.block).__name__
    if candidate.is_unknown:
        reason = "its experts are not stacks of matrices or modules of a list"
        return None, PatchedModule(candidate.path, name, "", reason)
    try:
        if candidate.is_attention:
            raise NotOurs("a mixture of attention heads is not a MoE block")
        if is_sharded(candidate.block):
            require_no_fsdp(model, candidate.path)
            if candidate.in_layer:
                raise NotOurs("router and experts without a block of their own, on several ranks")
        block = _replace_block(model, candidate, eplb)
        return block, PatchedModule(candidate.path, name, "block", "")
    except ConclaveCommError:
        raise
    except (NotOurs, Error) as error:
        reason = str(error)
    try:
        if is_sharded(candidate.block):
            require_no_fsdp(model, candidate.path)
        if candidate.is_list:
            block = _replace_list(model, candidate)
            return block, PatchedModule(candidate.path, name, "experts", reason)
        is_tied = candidate.experts in modules_with_tied_weights(model)
        experts = _PatchedExperts(candidate, hidden_size_of(model, candidate), is_tied)
        return experts, PatchedModule(candidate.path, name, "experts", reason)
    except (NotOurs, Error) as error:
        both = f"{reason}; experts alone: {error}"
        return None, PatchedModule(candidate.path, name, "", both)


def _replace_list(model: Any, candidate: Candidate) -> PatchedList | PatchedCalls:
    """Of a block whose experts are modules of their own: these, stacked. Raises NotOurs."""
    if candidate.is_attention or candidate.in_layer or is_sharded(candidate.block):
        raise NotOurs("a list of experts runs within its own block only")
    kind = PatchedCalls if has_forward(candidate.experts) else PatchedList
    return kind(model, candidate)


def _refuse_copy(module: torch.nn.Module, *_: Any) -> None:
    raise ConclaveRuntimeError(
        f"{type(module).__name__}: a patched model cannot be copied or pickled; unpatch it first"
    )


def _guard_copies(model: Any, candidate: Candidate, replacement: Any) -> None:
    """A copy of what was replaced would call the layer of the original."""
    parts: list[torch.nn.Module] = getattr(replacement, "sibling_modules", list)()
    for module in (model, *candidate.block.modules(), *parts):
        guard(module, "__reduce_ex__", _refuse_copy)


def patch(
    model: Any, release: bool = False, *, eplb: EplbOptions | bool | None = None
) -> PatchReport:
    """Replaces the MoE blocks of a loaded model by layers of the library, in place.

    A block is routing, experts, shared experts and what transforms stand around them. Each
    replacement is compared with the original on a few tokens first; where the results differ, or
    the family is none that the library knows, the experts alone are replaced, or nothing is.
    Weights that change later are packed again. A patched model cannot be copied or pickled.

    Args:
        model: a model of transformers.
        release: frees the model's own copy of packed weights, where the experts alone are
            replaced at their first call. It then has none to train, save, move or `unpatch`;
            `load_state_dict` brings new ones.
        eplb: rows of experts are counted, and whole experts that lie on several ranks follow their
            load, with `balancer_of(model)`. The same on every rank.

    Returns:
        What was replaced and what was not, with reasons and sizes.

    Raises:
        ConclaveValueError: the model is patched already; what `eplb` says fits none of its blocks.
        ConclaveUnsupportedError: `eplb` for a model without a block that was replaced whole.
        ConclaveCommError: another rank of a spread model met an error that has nothing to do with
            the block, or is lost. As after any error, what was not released is the model's own.
    """
    if model in _patches:
        raise ConclaveValueError("model: it is patched; unpatch it first")
    options = options_of(eplb)
    candidates = list(find_candidates(model))
    if options is not None:
        require_fit(options, candidates)
    forget_calls(model)
    before, resident = _bytes_of(model), _resident_bytes()
    modules, replacements = [], []
    try:
        for candidate in candidates:
            replacement, found = _replace(model, candidate, options)
            modules.append(found)
            if replacement is None:
                continue
            replacement.install()
            replacements.append(replacement)
            _guard_copies(model, candidate, replacement)
            if release:
                replacement.release()
    except BaseException:
        if not any(replacement.released_bytes for replacement in replacements):
            _take_back(model, replacements)
        raise
    if release:
        guard_released(model)
    _patches[model] = replacements
    paths = (found.path for found in modules if found.replaced)
    _paths[model] = dict(zip(paths, replacements, strict=True))
    _turns[model] = Turns()
    _turns[model].install(model)
    if options is not None:
        try:
            _balance(model, modules, replacements, options)
        except Error:
            with contextlib.suppress(ConclaveValueError):  # after a release
                unpatch(model)
            raise
    return PatchReport(
        modules=tuple(modules),
        model_bytes_before=before,
        model_bytes_after=_bytes_of(model),
        packed_bytes=sum(r.packed_bytes() for r in replacements),
        resident_before=resident,
        resident_after=_resident_bytes(),
    )


def _balance(
    model: Any, modules: list[PatchedModule], replacements: list[Any], options: EplbOptions
) -> None:
    """Counts rows from now on. Raises ConclaveUnsupportedError where nothing can be counted."""
    blocks = blocks_of([m for m in modules if m.replaced], replacements)
    if not blocks:
        said = "; ".join(f"{m.path}: {m.reason}" for m in modules[:3]) or "it has no MoE blocks"
        raise ConclaveUnsupportedError(f"eplb: no block of the model is replaced whole: {said}")
    _balancers[model] = ModelBalancer(model, blocks, options)


def balancer_of(model: Any) -> ModelBalancer:
    """What counts the rows of a model that was patched with `eplb`, and moves its experts.

    Raises:
        ConclaveValueError: the model is not patched so.
    """
    found = _balancers.get(model)
    if found is None:
        raise ConclaveValueError("model: expected one that was patched with eplb")
    return found


def replaced_in(model: Any) -> tuple[dict[str, Any], Turns]:
    """What stands in for each path of a patched model, and the gate that its forwards pass.

    Raises ConclaveValueError for any other model.
    """
    if model not in _patches:
        raise ConclaveValueError("model: expected one that is patched")
    return _paths[model], _turns[model]


def is_balanced(model: Any) -> bool:
    """Whether it was patched with `eplb`."""
    return model in _balancers


def _take_back(model: Any, replacements: list[Any]) -> None:
    for replacement in replacements:
        replacement.remove()
    for module in model.modules():
        unguard(module, "__reduce_ex__", _refuse_copy)


def unpatch(model: Any) -> None:
    """Gives a model its own blocks back; nothing happens to one that is not patched.

    Raises:
        ConclaveValueError: its weights were released.
    """
    replacements = _patches.get(model, [])
    if any(r.released_bytes for r in replacements):
        raise ConclaveValueError("model: its weights were released; load it again")
    balancer = _balancers.pop(model, None)
    if balancer is not None:
        balancer.close()
    turns = _turns.pop(model, None)
    if turns is not None:
        turns.remove(model)
    _take_back(model, replacements)
    _patches.pop(model, None)
    _paths.pop(model, None)
