"""A layer of the library from the tensors of a loaded model's block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conclave import _conclave, _runtime
from conclave.layer import Layer
from conclave.spec import LayerOptions, to_dict
from conclave.transformers._names import (
    config_text,
    in_memory,
    layer_number,
    published,
    tensors_below,
)
from conclave.transformers._packed import MAX_TOKENS
from conclave.transformers._traits import NotOurs


@dataclasses.dataclass(frozen=True)
class BlockLayer:
    """A packed block, and the modules whose weights it took in."""

    layer: Layer
    parts: tuple[str, ...]  # paths: the block's, and shared experts that the decoder layer calls


def _put(feed: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise NotOurs(f"{name} is on the meta device: its data is not in memory")
        feed.put(name, tensor.detach().cpu().contiguous())


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
    model: Any, number: int, parts: Sequence[str], further: Sequence[str], names: Callable
) -> tuple[Any, tuple[str, ...]]:
    """A feed with a complete layer, and what it took. Raises NotOurs, naming what is missing."""
    feed = _conclave.Feed.from_config(config_text(model))
    if number not in feed.layers():
        raise NotOurs(f"layer {number} is no MoE layer by the model's configuration")
    taken = list(parts)
    for part in parts:
        _put(feed, names(model, tensors_below(model, part)))
    for part in further:
        if feed.is_complete(number):
            break
        _put(feed, names(model, tensors_below(model, part)))
        taken.append(part)
    if not feed.is_complete(number):
        lacking = [name for name in feed.missing(4096) if f".{number}." in name]
        raise NotOurs(f"{parts[0]} lacks {', '.join(lacking[:3]) or 'tensors'}")
    return feed, tuple(taken)


def make_layer(
    model: Any, parts: Sequence[str], device: torch.device, with_siblings: bool = True
) -> BlockLayer:
    """Packs a block that lies at one path or several. Raises NotOurs or conclave.Error."""
    number = layer_number(parts[0])
    if number is None:
        raise NotOurs(f"{parts[0]} has no layer number")
    further = _siblings(model, parts[0]) if with_siblings else []
    try:
        feed, taken = _fill(model, number, parts, further, published)
    except NotOurs as error:
        try:
            feed, taken = _fill(model, number, parts, further, in_memory)
        except NotOurs:
            raise error from None
    context = _runtime.context("cpu" if device.type == "cpu" else f"cuda:{device.index or 0}")
    options = to_dict(LayerOptions(max_tokens=MAX_TOKENS))
    core = _conclave.Layer.from_feed(context, feed, number, options, {}, device.type == "cpu")
    return BlockLayer(Layer(core), taken)
