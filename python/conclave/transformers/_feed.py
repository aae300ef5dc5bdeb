"""A layer of the library from the tensors of a loaded model's block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from conclave import _conclave, _runtime
from conclave._devices import name_of, traits_of
from conclave._growing import growing
from conclave._methods import needs_plain_rows
from conclave.checkpoint import layer_info
from conclave.errors import ConclaveCommError, Error
from conclave.layer import Layer
from conclave.spec import LayerOptions, to_dict
from conclave.transformers._names import (
    config_text,
    in_memory,
    layer_number,
    published,
    tensors_below,
)
from conclave.transformers._packed import max_tokens
from conclave.transformers._split import Split
from conclave.transformers._traits import NotOurs

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class BlockLayer:
    """A packed block, and the modules whose weights it took in."""

    layer: Layer
    parts: tuple[str, ...]  # paths: the block's, and shared experts that the decoder layer calls


def _put(feed: Any, tensors: dict[str, torch.Tensor], kept: list[torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise NotOurs(f"{name} is on the meta device: its data is not in memory")
        kept.append(tensor.detach().cpu().contiguous())
        feed.put_in_place(name, kept[-1])


def _siblings(model: Any, path: str) -> list[str]:
    """Modules beside a block that may be parts of it: shared experts, in no case attention."""
    parent, _, own = path.rpartition(".")
    children = model.get_submodule(parent).named_children()
    return [
        f"{parent}.{name}"
        for name, _ in children
        if name != own and "attn" not in name and "norm" not in name
    ]


def _fill(
    feed: Any,
    model: Any,
    parts: Sequence[str],
    further: Sequence[str],
    number: int,
    names: Callable,
    tensors_of: Callable[[str], dict[str, torch.Tensor]] | None = None,
) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """Completes the feed's layer: what it took, and tensors that must live as long as the feed.
    Tensors are those of the model, or of a part's path by `tensors_of`.

    Raises NotOurs, naming what is missing.
    """
    below = tensors_of or functools.partial(tensors_below, model)
    kept: list[torch.Tensor] = []
    taken = []
    for part in (*parts, *further):
        if part in further and feed.is_complete(number):
            break
        _put(feed, names(model, below(part)), kept)
        taken.append(part)
    if not feed.is_complete(number):
        lacking = [name for name in feed.missing(4096) if f".{number}." in name]
        raise NotOurs(f"{parts[0]} lacks {', '.join(lacking[:3]) or 'tensors'}")
    return tuple(taken), kept


def make_layer(
    model: Any,
    parts: Sequence[str],
    device: torch.device,
    names: Callable,
    alone: bool = False,
    split: Split | None = None,
    counts: bool = False,
) -> BlockLayer:
    """Packs a block that lies at one path or several, or this rank's part of it. Raises NotOurs or
    conclave.Error.

    `names` gives tensors their names on disk. Weights beside the block, which the decoder layer
    adds, belong to it unless it is `alone`. Rows of experts are counted on the CPU, and on a GPU
    where `counts` says so.
    """
    number = layer_number(parts[0])
    if number is None:
        raise NotOurs(f"{parts[0]} has no layer number")
    further = [] if alone else _siblings(model, parts[0])
    feed = _conclave.Feed.from_config(config_text(model))
    if number not in feed.layers():
        raise NotOurs(f"layer {number} is no MoE layer by the model's configuration")
    taken, kept = _fill(feed, model, parts, further, number, names)
    context = _runtime.context(
        name_of(device),
        communicator=split.expert_communicator if split is not None else None,
        tensor_communicator=split.tensor_communicator if split is not None else None,
    )
    spec = layer_info(feed.layer(number)).spec
    parallel = split.parallel(spec.num_experts) if split is not None else {}
    spare = split.spare_experts if split is not None else 0
    options = to_dict(LayerOptions(max_tokens=max_tokens(device), spare_experts=spare))
    plain_rows = needs_plain_rows(spec, device.type)
    counts = counts or traits_of(device.type).counts
    core = _conclave.Layer.from_feed(context, feed, number, options, parallel, counts, plain_rows)
    del feed, kept
    return BlockLayer(growing(Layer(core)), taken)


def stage_tensors(
    refit: Any,
    model: Any,
    parts: Sequence[str],
    names: Callable,
    tensors_of: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    """Packs other weights of the same parts beside those of a layer that `make_layer` made. Raises
    NotOurs or conclave.Error."""
    number = layer_number(parts[0])
    feed = _conclave.Feed.from_config(config_text(model))
    _, kept = _fill(feed, model, parts, (), number, names, tensors_of)  # type: ignore[arg-type]
    refit._core.stage_feed(feed, number, [], [])
    del feed, kept


def first_that_fits(attempt: Callable[[Callable], _Result]) -> _Result:
    """Tries a model's own names first, whose tensors lie ready, then the published ones, whose
    stacks may have to be cut up. Raises what the last attempt raises."""
    try:
        return attempt(in_memory)
    except ConclaveCommError:  # the ranks are not together any more
        raise
    except (NotOurs, Error):
        return attempt(published)
